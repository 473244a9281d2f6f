"""CUDA devices, asked of the driver: importing torch for it would take seconds. Imports nothing of ours."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import runpy
from pathlib import Path
from typing import Any

_DRIVER = "libcuda.so.1"


def is_usable() -> bool:
    """Whether torch is built for CUDA, and finds a device."""
    version, is_for_nvidia = torch_build()
    return bool(version) and is_for_nvidia and num_devices() > 0


def torch_build() -> tuple[str | None, bool]:
    """The version of the toolkit that torch is built for, empty for none, None if that is not known; and
    whether it is NVIDIA's."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None, True
    build = runpy.run_path(str(Path(found.origin).parent / "version.py"))
    cuda, hip = build.get("cuda"), build.get("hip")
    return str(cuda or hip or ""), not hip


def num_devices() -> int:
    """Devices that this process may use."""
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def total_bytes(device: str) -> int:
    """Memory of a CUDA device; 0 if that is not known."""
    driver, handle, size = _driver(), ctypes.c_int(), ctypes.c_size_t()
    index = int(device.partition(":")[2] or 0)
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), index):
        return 0
    failed = driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    return 0 if failed else size.value


@functools.cache
def _driver() -> Any:
    """NVIDIA's driver, initialised; None without one."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    return None if driver.cuInit(0) else driver
