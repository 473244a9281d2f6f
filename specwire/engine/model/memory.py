"""Free memory of a device, for the size of the KV cache."""

from __future__ import annotations

from pathlib import Path

import torch

from specwire.errors import ModelLoadError

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a CUDA device, or on the host within its cgroup."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # include what loading freed
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_available_bytes(), _cgroup_bytes(_CGROUP))


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


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say what memory is available")


def _cgroup_bytes(directory: Path) -> int:
    """What remains of a container's limit (cgroup v2); practically infinite without one."""
    try:
        limit, used = ((directory / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - int(used))
