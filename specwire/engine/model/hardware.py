"""The device that a service computes on."""

from __future__ import annotations

import torch

from specwire.errors import ConfigError


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
