"""Ports of this machine that can be listened on. Imports nothing of ours."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def check_free(host: str, port: int) -> None:
    """Bind it, and close again, or raise OSError. As gRPC does, take all IPv4 addresses for `::` where there
    is no IPv6."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if host != "::" or error.errno not in _NO_SUCH_FAMILY:
            raise
        socket.create_server(("0.0.0.0", port)).close()


def are_free(host: str, ports: Iterable[int]) -> bool:
    """Whether all of them can be bound."""
    try:
        for port in ports:
            check_free(host, port)
    except OSError:
        return False
    return True
