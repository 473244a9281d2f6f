"""File descriptors: raises the limit, and keeps some from connections, each of which takes one.

A gRPC server closes connections over `max_connections` at once, so that files can be read and peers reached
under any number of clients. asyncio's servers (HTTP, metrics) leave them waiting until others close.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import time
from typing import Any

log = logging.getLogger(__name__)

_MOST_RESERVED = 128
# An idle connection takes 15 kB and a ping a second.
_MAX_CONNECTIONS = 4_096
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_CHECK_EVERY_S = 1.0
_WARN_EVERY_S = 30.0


def max_connections() -> int:
    """How many connections a server may accept, so that descriptors remain for other uses."""
    limit = _limit()
    return min(limit - min(_MOST_RESERVED, limit // 4), _MAX_CONNECTIONS)


def max_accepted() -> int:
    """Of all descriptors, the most at which a server still accepts, to close others that wait for nothing."""
    return (max_connections() + _limit()) // 2


def set_up() -> None:
    """Raise this process's limit as far as allowed, and have the running loop warn in one line when it is
    reached, where asyncio itself logs a hundred tracebacks a second.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems have another, lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop, warned_s = asyncio.get_running_loop(), -_WARN_EVERY_S

    def warn() -> None:
        nonlocal warned_s
        now_s = time.monotonic()
        if now_s - warned_s >= _WARN_EVERY_S:
            warned_s = now_s
            said = "%d of %d file descriptors are open: new connections are closed, or wait"
            log.warning(said, num_open(), _limit())

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NONE_LEFT:
            warn()
        else:
            loop.default_exception_handler(context)

    def check() -> None:
        """Now, and every second from now on."""
        if num_open() >= max_connections():
            warn()
        loop.call_later(_CHECK_EVERY_S, check)

    loop.set_exception_handler(handle)
    check()


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS * 2 if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """How many are open in this process."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError as error:  # listing takes one
        return _limit() if error.errno in _NONE_LEFT else 0
