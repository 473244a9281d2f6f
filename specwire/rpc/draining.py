"""The running requests of a service, from when it serves to its graceful end. Knows no grpc."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from specwire.errors import ServiceDrainingError, ServiceLoadingError


class Drain:
    """Admits requests until it is closed, and waits for those that run. For one event loop.

    Attributes:
        is_loading: whether it admits none yet, as the service loads its model.
        is_closed: whether it admits no more requests.
        num_running: requests that run.
    """

    def __init__(self) -> None:
        self.is_loading = False
        self.num_running = 0
        self.is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_close: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while the body runs; refuse it while the service loads, or once closed."""
        if self.is_closed:
            raise ServiceDrainingError("the service is shutting down")
        if self.is_loading:
            raise ServiceLoadingError("the service loads its model")
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    def close(self) -> None:
        """Admit no more requests."""
        self.is_closed = True
        for call in self._on_close:
            call()

    @contextlib.contextmanager
    def closing(self, call: Callable[[], None]) -> Iterator[None]:
        """Call this when it is closed, if that is while the body runs."""
        self._on_close.append(call)
        try:
            yield
        finally:
            self._on_close.remove(call)

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request runs; False at the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self.num_running
