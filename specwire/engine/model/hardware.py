"""The device that a service computes on."""

from __future__ import annotations

import torch

from specwire.errors import ConfigError


def select_device(name: str) -> torch.device:
    """The device of this name, made the calling thread's own where there are several.

    Raises:
        ConfigError: torch knows no such device, or this machine lacks it.
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
    torch.cuda.set_device(device)  # kernels and graphs go to the current one
    return device
