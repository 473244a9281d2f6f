"""Timers with a precision of about 0.1 ms, where asyncio is up to 1 ms late."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import math
import os
import sys
import time
from collections.abc import Callable

_ABSOLUTE_TIME = 1  # TFD_TIMER_ABSTIME
_LONGEST_WAIT_S = 3600.0


class Alarm:
    """Calls back, on the running event loop, at times of the monotonic clock.

    On Linux the loop waits in epoll, whose timeout asyncio rounds up to whole milliseconds: `loop.call_at` is
    half a millisecond late on average. A timerfd has nanoseconds, and epoll can wait for it. Loops of other
    systems do not round.

    Raises:
        OSError: no file descriptor is left.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # equal times are called in order of arrival
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
            self._loop.add_reader(self._fd, self._ring)

    def set(self, when_s: float, callback: Callable[[], None]) -> None:
        """Call back at this time, once."""
        number = next(self._numbers)
        heapq.heappush(self._waiting, (when_s, number, callback))
        if self._waiting[0][1] == number:
            self._wait()

    def close(self) -> None:
        """Cancel all callbacks."""
        self._waiting.clear()
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _wait(self) -> None:
        when_s = min(self._waiting[0][0], time.monotonic() + _LONGEST_WAIT_S)
        if self._fd < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_at(when_s, self._ring)
            return
        seconds, nanoseconds = divmod(math.ceil(when_s * 1e9), 10**9)
        interval_and_value = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)
        self._libc.timerfd_settime(self._fd, _ABSOLUTE_TIME, interval_and_value, None)

    def _ring(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            heapq.heappop(self._waiting)[2]()
        if self._waiting:
            self._wait()
