"""Whether the devices that flags name are there."""

from __future__ import annotations

from specwire.config import cuda
from specwire.config.flags import flag_name
from specwire.errors import ConfigError


def check(name: str, device: str, num_devices: int = 1) -> None:
    """Refuse a CUDA device that torch will not find.

    Args:
        num_devices: how many are used from this one on.

    Raises:
        ConfigError: names the flag and the device.
    """
    if not device.startswith("cuda"):
        return
    version, is_for_nvidia = cuda.torch_build()
    if version and not is_for_nvidia:
        return  # other drivers are asked by torch itself
    what = f"{flag_name(name)} {device}: "
    if version == "":
        raise ConfigError(f"{what}torch is built for the CPU only; install a build for CUDA, or give cpu")
    num_there = cuda.num_devices()
    if not num_there:
        raise ConfigError(f"{what}there is no CUDA device here; give cpu")
    last = int(device.partition(":")[2] or 0) + num_devices - 1
    if last >= num_there:
        raise ConfigError(
            f"{what}needs cuda:{last}, and the last of {num_there} devices is cuda:{num_there - 1}"
        )
