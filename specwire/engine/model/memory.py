"""Memory of a device, for the size of the KV cache."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from specwire.config.preflight.memory import free_host_bytes, total_host_bytes
from specwire.config.services import ModelServiceConfig
from specwire.engine.cache.kv_cache import MOST_NAMED_STATES
from specwire.engine.model.recurrent import MOST_STATES
from specwire.errors import ModelLoadError


def num_pages(
    config: ModelServiceConfig, device: torch.device, num_sharing: int = 1
) -> int | Callable[[int, int], int]:
    """Pages of the KV cache; where memory decides, a function of the bytes of one, and of those of a
    state of the recurrent layers; for all states that there may be, room is left.

    Args:
        num_sharing: processes that share the device's memory evenly.
    """
    num_states = MOST_STATES * config.max_sequences + MOST_NAMED_STATES
    if config.kv_cache_memory:
        fraction = config.kv_cache_memory / num_sharing
        return functools.partial(_pages_in_free, fraction, device, num_states)
    if config.gpu_memory_utilization:
        utilization = config.gpu_memory_utilization
        return functools.partial(_pages_up_to, utilization, device, num_sharing, num_states)
    return config.num_pages


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a CUDA device, or on the host within its cgroup."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # include what loading freed
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def total_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device, or of the host within its cgroup."""
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else total_host_bytes()


def _pages_in_free(
    fraction: float, device: torch.device, num_states: int, page_bytes: int, state_bytes: int
) -> int:
    """Pages in a fraction of the memory that is free now.

    Raises:
        ModelLoadError: less than one page fits.
    """
    left = int(free_bytes(device) * fraction)
    return _pages(f"--kv-cache-memory {fraction}", left, device, page_bytes, num_states * state_bytes)


def _pages_up_to(
    utilization: float,
    device: torch.device,
    num_sharing: int,
    num_states: int,
    page_bytes: int,
    state_bytes: int,
) -> int:
    """Pages until so much of the memory is in use, by the model and all else. Errors as above."""
    total = total_bytes(device)
    left = (int(total * utilization) - (total - free_bytes(device))) // num_sharing
    what = f"--gpu-memory-utilization {utilization}"
    return _pages(what, left, device, page_bytes, num_states * state_bytes)


def _pages(what: str, num_bytes: int, device: torch.device, page_bytes: int, states_bytes: int) -> int:
    if not page_bytes:
        raise ModelLoadError(f"{what}: the model keeps no keys and values; give --num-kv-tokens")
    if num_bytes - states_bytes < page_bytes:
        problem = f"leaves {max(0, num_bytes)} bytes on {device}, less than a page of {page_bytes}"
        if states_bytes:
            problem += f" and {states_bytes} for states of recurrent layers (--max-sequences)"
        raise ModelLoadError(f"{what} {problem}")
    return (num_bytes - states_bytes) // page_bytes
