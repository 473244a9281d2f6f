"""Who may run now, who waits, and who is told to come back later. Knows no grpc.

A place that becomes free goes to the client with the fewest generations running; among equals to the one
served least recently. When the queue is full, the client that fills it most gives up its newest entry, so
a thousand requests of one client never keep out the one of another. A client may have limits of its own:
what is over them waits or is refused while there is room for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from specwire.errors import ResourceExhaustedError
from specwire.tokens import Holder

_MIN_RETRY_MS, _MAX_RETRY_MS = 50, 10_000
_SMOOTHING = 0.1


@dataclass(eq=False)
class _Entry:
    client: Holder
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Limits on running and waiting generations, fair between clients."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        self._waiting: list[_Entry] = []
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0
        self._mean_duration_s = 1.0

    @property
    def num_running(self) -> int:
        """Generations running."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Generations waiting for a place."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, client: Holder) -> AsyncIterator[None]:
        """Hold a place while the body runs, after waiting for it if need be.

        Raises:
            ResourceExhaustedError: the queue, or the client's part of it, is full; says when to try again.
        """
        if self._may_start(client):  # who waits in spite of a free place has reached a limit of its own
            self._start(client.name)
        else:
            await self._wait(client)
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._mean_duration_s += _SMOOTHING * (time.monotonic() - started_s - self._mean_duration_s)
            self._release(client.name)

    def _may_start(self, client: Holder) -> bool:
        within_own = client.max_running is None or self._running[client.name] < client.max_running
        return within_own and self.num_running < self._max_running

    async def _wait(self, client: Holder) -> None:
        if client.max_waiting is not None:
            num_own = sum(entry.client.name == client.name for entry in self._waiting)
            if num_own >= client.max_waiting:
                raise self._full(
                    f"{self._running[client.name]} generations of {client.name} run, {num_own} wait"
                )
        if self.num_waiting >= self._max_waiting:
            self._refuse_one(client.name)
        entry = _Entry(client)
        self._waiting.append(entry)
        try:
            await entry.admitted
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry.admitted.done() and not entry.admitted.cancelled() and not entry.admitted.exception():
                self._release(client.name)  # admitted in the same moment
            raise

    def _refuse_one(self, client: str) -> None:
        """Make room in the queue, at the cost of the client that fills it most."""
        counts = Counter(entry.client.name for entry in self._waiting)
        greediest, most = counts.most_common(1)[0] if counts else (client, 0)
        if counts[client] + 1 >= most:
            raise self._full()
        newest = next(entry for entry in reversed(self._waiting) if entry.client.name == greediest)
        self._waiting.remove(newest)
        newest.admitted.set_exception(self._full())

    def _full(self, why: str = "") -> ResourceExhaustedError:
        wait_ms = 1e3 * self._mean_duration_s * (self.num_waiting + 1) / self._max_running
        retry_after_ms = int(min(max(wait_ms, _MIN_RETRY_MS), _MAX_RETRY_MS))
        why = why or f"{self.num_running} generations run, {self.num_waiting} wait"
        return ResourceExhaustedError(f"{why}; try again in {retry_after_ms} ms", retry_after_ms)

    def _start(self, client: str) -> None:
        self._running[client] += 1
        self._num_turns += 1
        self._last_turn[client] = self._num_turns

    def _release(self, client: str) -> None:
        self._running[client] -= 1
        while ready := [entry for entry in self._waiting if self._may_start(entry.client)]:
            entry = min(ready, key=self._claim)
            self._waiting.remove(entry)
            if not entry.admitted.done():
                self._start(entry.client.name)
                entry.admitted.set_result(None)
        self._forget_absent(client)

    def _claim(self, entry: _Entry) -> tuple[int, int]:
        """The smaller, the sooner; entries of one client keep their order."""
        return self._running[entry.client.name], self._last_turn.get(entry.client.name, 0)

    def _forget_absent(self, client: str) -> None:
        if not self._running[client]:
            del self._running[client]
            if all(entry.client.name != client for entry in self._waiting):
                self._last_turn.pop(client, None)
