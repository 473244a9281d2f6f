"""Whether addresses can be listened on, and the devices that flags name are there."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from specwire.config import cuda, ports
from specwire.config.fields import split_address
from specwire.config.flags import flag_name
from specwire.errors import ConfigError

_REMEDIES = {
    errno.EADDRINUSE: "stop what listens there, or give another port (0 picks a free one)",
    errno.EADDRNOTAVAIL: "give an address of this machine",
    errno.EACCES: "give a port from 1024 on",
}
Listened = tuple[tuple[str, ...], str]
"""The name of the field of an address, or those of its host and its port; and the address."""


def check_addresses(addresses: Sequence[Listened]) -> None:
    """Refuse addresses that cannot be bound, and two that have the same port. Empty ones are skipped.
    ConfigError names the flag and the value."""
    taken: dict[str, str] = {}
    for names, address in addresses:
        if not address:
            continue
        host, port = split_address("", address)
        values = (address,) if len(names) == 1 else (host.strip("[]"), port)
        of_host, *_ = said = [f"{flag_name(name)} {value}" for name, value in zip(names, values, strict=True)]
        of_port = said[-1]
        if port and address in taken:
            raise ConfigError(f"{of_port}: is taken by {taken[address]}")
        _check_free(host, port, of_host, of_port)
        taken[address] = of_port.split()[0]


def _check_free(host: str, port: int, of_host: str, of_port: str) -> None:
    try:
        ports.check_free(host.strip("[]"), port)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        # A failed look-up of a name has no errno of the system.
        is_looked_up = bool(error.errno and error.errno > 0)
        problem = os.strerror(error.errno or 0) if is_looked_up else str(error.strerror)
        is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"{of_port if is_of_port else of_host}: cannot be bound ({problem})" + (remedy and f"; {remedy}")
        ) from None


def check_device(name: str, device: str, num_devices: int = 1) -> None:
    """Refuse a CUDA device that torch will not find, or as many from there on; ConfigError names the flag."""
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
