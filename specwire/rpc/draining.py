"""What runs in a service, and how it comes to its end. Knows no grpc."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from specwire.errors import ServiceUnavailableError


class Drain:
    """Lets requests in until it is closed, and waits for those that are in. For one event loop."""

    def __init__(self) -> None:
        self._num_running = 0
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests that are in."""
        return self._num_running

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Be in while the body runs.

        Raises:
            ServiceUnavailableError: it is closed.
        """
        if self._is_closed:
            raise ServiceUnavailableError("the service is shutting down")
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closed = True

    async def idle(self, timeout_s: float) -> bool:
        """Wait until nobody is in; False when the time is over before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self._num_running
