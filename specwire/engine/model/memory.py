"""The device that a service computes on, and its memory, for the size of the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specwire.config.preflight.memory import free_host_bytes, total_host_bytes
from specwire.config.services import ModelServiceConfig
from specwire.engine.cache.kv_cache import MOST_NAMED_STATES
from specwire.engine.model.recurrent import MOST_STATES
from specwire.errors import ConfigError, ModelLoadError


def select_device(name: str) -> torch.device:
    """The device of this name; a CUDA device becomes the calling thread's current one.

    Raises:
        ConfigError: torch does not know the device, or this machine does not have it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name}: is neither cpu nor cuda nor cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"--device {name}: only cpu and cuda are served")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_devices:
        raise ConfigError(f"--device {name}: torch {torch.__version__} finds no CUDA device here")
    device = torch.device("cuda", device.index or 0)
    if device.index >= num_devices:
        raise ConfigError(f"--device {name}: the last of {num_devices} devices is cuda:{num_devices - 1}")
    torch.cuda.set_device(device)  # kernels and graphs run on the current device
    return device


def num_pages(
    config: ModelServiceConfig, device: torch.device, num_sharing: int = 1
) -> int | Callable[[int, int], int]:
    """Pages of the KV cache; where memory decides, a function of the bytes of one, and of a state of the
    recurrent layers, for all of which room is left. It raises a ModelLoadError where less than a page fits.

    Args:
        num_sharing: processes that share the device's memory evenly.
    """
    num_states = MOST_STATES * config.max_sequences + MOST_NAMED_STATES

    def fitting(page_bytes: int, state_bytes: int) -> int:
        free, total = free_and_total_bytes(device)
        if config.kv_cache_memory:  # of what is free now
            fraction = config.kv_cache_memory / num_sharing
            what, left = f"--kv-cache-memory {fraction}", int(free * fraction)
        else:  # with the model and all else
            utilization = config.gpu_memory_utilization
            what = f"--gpu-memory-utilization {utilization}"
            left = (int(total * utilization) - (total - free)) // num_sharing
        if not page_bytes:
            raise ModelLoadError(f"{what}: the model keeps no keys and values; give --num-kv-tokens")
        states_bytes = num_states * state_bytes
        if left - states_bytes < page_bytes:
            problem = f"leaves {max(0, left)} bytes on {device}, less than a page of {page_bytes}"
            if states_bytes:
                problem += f" and {states_bytes} for states of recurrent layers (--max-sequences)"
            raise ModelLoadError(f"{what} {problem}")
        return (left - states_bytes) // page_bytes

    return fitting if config.fills_memory else config.num_pages


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes of a CUDA device, or of the host within its cgroup: those that can be allocated, and all."""
    if device.type != "cuda":
        return free_host_bytes(), total_host_bytes()
    torch.cuda.empty_cache()  # include what loading freed
    return torch.cuda.mem_get_info(device)
