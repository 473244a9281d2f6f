"""Whether addresses can be listened on."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from specwire import ports
from specwire.config.fields import split_address
from specwire.config.flags import flag_name
from specwire.errors import ConfigError

_REMEDIES = {
    errno.EADDRINUSE: "stop what listens there, or give another port (0 picks a free one)",
    errno.EADDRNOTAVAIL: "give an address of this machine",
    errno.EACCES: "give a port from 1024 on",
}


def check_all(addresses: Sequence[tuple[str, str]]) -> None:
    """Refuse addresses that cannot be bound, and two that have the same port.

    Args:
        addresses: each with the name of its field; empty ones are skipped.

    Raises:
        ConfigError: names the flag and the address.
    """
    names: dict[str, str] = {}
    for name, address in addresses:
        if not address:
            continue
        _, port = split_address(name, address)
        if port and address in names:
            raise ConfigError(f"{flag_name(name)} {address}: is taken by {flag_name(names[address])}")
        check_free(name, address)
        names[address] = name


def check_free(name: str, address: str) -> None:
    """Raises:
    ConfigError: it cannot be bound; names the flag, the address and what to do.
    """
    host, port = split_address(name, address)
    try:
        ports.check_free(host.strip("[]"), port)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        # A failed look-up of a name has no errno of the system.
        problem = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
        raise ConfigError(
            f"{flag_name(name)} {address}: cannot be bound ({problem})" + (remedy and f"; {remedy}")
        ) from None
