"""File descriptors, of which every connection takes one: as many as allowed, and fewer connections than that.

A gRPC server closes connections over `max_connections` at once, so that files can be read and peers reached
however many clients there are. asyncio's servers (HTTP, metrics) leave them waiting until others close.
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
_LOOK_EVERY_S = 1.0
_WARN_EVERY_S = 30.0


def max_connections() -> int:
    """How many connections a server may accept, so that descriptors are left for all else."""
    limit = _limit()
    return min(limit - min(_MOST_RESERVED, limit // 4), _MAX_CONNECTIONS)


def max_accepted() -> int:
    """Of all descriptors, the most at which a server still accepts, to close others that wait for nothing."""
    return (max_connections() + _limit()) // 2


def set_up() -> None:
    """Raise this process's limit as far as allowed, and have the running loop warn when it is reached, in one
    line. asyncio itself logs a hundred tracebacks a second then.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit beside it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = asyncio.get_running_loop()
    watch = _Watch(loop)
    loop.set_exception_handler(watch.handle)
    watch.look()


class _Watch:
    """Looks now and then, and warns at most once in a while."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._warned_s = -_WARN_EVERY_S

    def look(self) -> None:
        """Now, and from now on every second."""
        if num_open() >= max_connections():
            self._warn()
        self._loop.call_later(_LOOK_EVERY_S, self.look)

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See `loop.set_exception_handler`."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NONE_LEFT:
            self._warn()
        else:
            loop.default_exception_handler(context)

    def _warn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(
                "%d of %d file descriptors are open: new connections are closed, or wait",
                num_open(),
                _limit(),
            )


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS * 2 if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """How many are open in this process."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError as error:  # to look takes one
        return _limit() if error.errno in _NONE_LEFT else 0
