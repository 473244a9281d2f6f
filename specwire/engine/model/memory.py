"""Free memory of a device, for the size of the KV cache."""

from __future__ import annotations

import torch

from specwire.errors import ModelLoadError
from specwire.preflight.memory import free_host_bytes


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a CUDA device, or on the host within its cgroup."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # include what loading freed
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def pages_in_memory(fraction: float, device: torch.device, page_bytes: int) -> int:
    """Pages in a fraction of the memory that is free now.

    Raises:
        ModelLoadError: less than one page fits.
    """
    num_bytes = int(free_bytes(device) * fraction)
    if num_bytes < page_bytes:
        raise ModelLoadError(
            f"--kv-cache-memory {fraction} is {num_bytes} bytes on {device}, less than a page of {page_bytes}"
        )
    return num_bytes // page_bytes
