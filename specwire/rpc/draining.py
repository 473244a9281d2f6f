"""The running requests of a service, from when it serves to its graceful end, and how many calls each caller
may have open. Knows no grpc."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from specwire.errors import ResourceExhaustedError, ServiceDrainingError, ServiceLoadingError

_RETRY_AFTER_MS = 1_000


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


class Slots:
    """Slots that open calls hold, counted for each key that has a limit: a caller, a connection.

    Args:
        what: the plural noun of what is counted, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def held(self, limits: Mapping[str, int]) -> Iterator[None]:
        """Hold a slot of each key while the body runs; `ResourceExhaustedError` if one has none left.

        Args:
            limits: key to its number of slots.
        """
        for key, most in limits.items():
            if self._held[key] >= most:
                problem = f"{most} {self._what} of {key} are open, which is the most"
                raise ResourceExhaustedError(problem, _RETRY_AFTER_MS)
        self._held.update(limits.keys())
        try:
            yield
        finally:
            self._held.subtract(limits.keys())
            for key in limits:
                if not self._held[key]:
                    del self._held[key]
