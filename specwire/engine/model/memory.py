"""Memory of a device, for the size of the KV cache."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from specwire.config.preflight.memory import free_host_bytes, total_host_bytes
from specwire.config.services import ModelServiceConfig
from specwire.errors import ModelLoadError


def num_pages(
    config: ModelServiceConfig, device: torch.device, num_sharing: int = 1
) -> int | Callable[[int], int]:
    """Pages of the KV cache; where memory decides, a function of the bytes of one.

    Args:
        num_sharing: processes that share the device's memory evenly.
    """
    if config.kv_cache_memory:
        return functools.partial(_pages_in_free, config.kv_cache_memory / num_sharing, device)
    if config.gpu_memory_utilization:
        return functools.partial(_pages_up_to, config.gpu_memory_utilization, device, num_sharing)
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


def _pages_in_free(fraction: float, device: torch.device, page_bytes: int) -> int:
    """Pages in a fraction of the memory that is free now.

    Raises:
        ModelLoadError: less than one page fits.
    """
    return _pages(f"--kv-cache-memory {fraction}", int(free_bytes(device) * fraction), device, page_bytes)


def _pages_up_to(utilization: float, device: torch.device, num_sharing: int, page_bytes: int) -> int:
    """Pages until so much of the memory is in use, by the model and all else. Errors as above."""
    total = total_bytes(device)
    left = int(total * utilization) - (total - free_bytes(device))
    return _pages(f"--gpu-memory-utilization {utilization}", left // num_sharing, device, page_bytes)


def _pages(what: str, num_bytes: int, device: torch.device, page_bytes: int) -> int:
    if num_bytes < page_bytes:
        problem = f"leaves {max(0, num_bytes)} bytes on {device}, less than a page of {page_bytes}"
        raise ModelLoadError(f"{what} {problem}")
    return num_bytes // page_bytes
