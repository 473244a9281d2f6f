"""Whether devices are there, asked of the driver: importing torch for it would take seconds."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import runpy
from pathlib import Path
from typing import Any

from specwire.config.flags import flag_name
from specwire.errors import ConfigError

_DRIVER = "libcuda.so.1"


def check(name: str, device: str, num_devices: int = 1) -> None:
    """Refuse a CUDA device that torch will not find.

    Args:
        num_devices: how many are used from this one on.

    Raises:
        ConfigError: names the flag and the device.
    """
    if not device.startswith("cuda"):
        return
    version, is_for_nvidia = _torch_build()
    if version and not is_for_nvidia:
        return  # other drivers are asked by torch itself
    what = f"{flag_name(name)} {device}: "
    if version == "":
        raise ConfigError(f"{what}torch is built for the CPU only; install a build for CUDA, or give cpu")
    num_there = num_cuda_devices()
    if not num_there:
        raise ConfigError(f"{what}there is no CUDA device here; give cpu")
    last = int(device.partition(":")[2] or 0) + num_devices - 1
    if last >= num_there:
        raise ConfigError(
            f"{what}needs cuda:{last}, and the last of {num_there} devices is cuda:{num_there - 1}"
        )


def _torch_build() -> tuple[str | None, bool]:
    """The version of the toolkit that torch is built for, empty for none, None if that is not known; and
    whether it is NVIDIA's."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None, True
    build = runpy.run_path(str(Path(found.origin).parent / "version.py"))
    cuda, hip = build.get("cuda"), build.get("hip")
    return str(cuda or hip or ""), not hip


def num_cuda_devices() -> int:
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
