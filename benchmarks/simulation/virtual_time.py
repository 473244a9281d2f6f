"""An event loop on which nothing waits: when nothing is left to do now, it is the time of the next timer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from specwire import clock

Result = TypeVar("Result")


class _NoSockets:
    """Stands in for the selector: to wait for input is to let the time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Pass `timeout` seconds.

        Raises:
            RuntimeError: everything waits, and for nothing that will ever happen.
        """
        if timeout is None:
            raise RuntimeError("nothing is left to happen: the simulation waits for ever")
        self._loop.pass_time(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Deterministic: callbacks of one moment run in the order in which they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = 1e-9
        self._selector = _NoSockets(self)

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self._now_s

    def now_ns(self) -> int:
        """The same in nanoseconds."""
        return round(self._now_s * 1e9)

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now_s += seconds

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing to wake up: there is one thread, and it never sleeps."""


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, in simulated time that begins at 0; what still runs at the end is cancelled."""
    loop = VirtualLoop()
    with clock.simulated(loop.now_ns):
        try:
            asyncio.set_event_loop(loop)
            return loop.run_until_complete(main)
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            asyncio.set_event_loop(None)
            loop.close()
