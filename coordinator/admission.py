"""Who may run now, who waits, and who is told to come back later. Knows no grpc.

A place that becomes free goes to the client with the fewest generations running; among equals to the one
served least recently. When the queue is full, the client that fills it most gives up its newest entry, so
a thousand requests of one client never keep out the one of another. A client may have limits of its own:
what is over them waits or is refused while there is room for others.

A generation that waits for its client leaves its place to others, and gets in line again when the client
goes on:

    arrives ──▶ waits ──▶ runs ──▶ paused ──▶ waits ──▶ runs ──▶ ends

It is never refused then: the limits on what waits are for generations that have not begun. As many may be
paused as may run and wait; when one more is, the client with most of them loses the one paused the longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from specwire.errors import ResourceExhaustedError, StreamIdleError
from specwire.security.bearer import Principal

_MIN_RETRY_MS, _MAX_RETRY_MS = 50, 10_000
_SMOOTHING = 0.1


@dataclass(eq=False)
class _Entry:
    client: Principal
    has_begun: bool
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdmissionSlot:
    """What a generation needs to run. Given by `Admission.place`; for one task."""

    def __init__(self, admission: Admission, client: Principal) -> None:
        self._admission = admission
        self.client = client
        self._taken_s: float | None = None
        self._pause = asyncio.timeout(None)

    async def take(self, *, has_begun: bool) -> None:
        """Wait for it. Errors as for `Admission.place`."""
        await self._admission.wait(self.client, has_begun=has_begun)
        self._taken_s = time.monotonic()

    def leave(self) -> None:
        """Give it to the next one; harmless without it."""
        if self._taken_s is not None:
            turn_s, self._taken_s = time.monotonic() - self._taken_s, None
            self._admission.release(self.client, turn_s)

    @contextlib.asynccontextmanager
    async def left(self) -> AsyncIterator[None]:
        """Be without it while the body waits for the client; then wait for one again.

        Raises:
            StreamIdleError: too many are paused, and this one for the longest time.
        """
        self.leave()
        try:
            async with asyncio.timeout(None) as self._pause:
                with self._admission.paused(self):
                    yield
        except TimeoutError:
            raise StreamIdleError("too many streams are paused, this one for the longest time") from None
        await self.take(has_begun=True)

    def end_pause(self) -> None:
        """Let the body of `left` end with an error."""
        self._pause.reschedule(asyncio.get_running_loop().time())


class Admission:
    """Limits on running, waiting and paused generations, fair between clients."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        self._waiting: list[_Entry] = []
        self._paused: list[AdmissionSlot] = []  # the one that has been for the longest time comes first
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0
        self._mean_turn_s = 1.0

    @property
    def num_running(self) -> int:
        """Generations running."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Generations waiting for a place."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Generations without a place, waiting for their clients."""
        return len(self._paused)

    @contextlib.asynccontextmanager
    async def place(self, client: Principal) -> AsyncIterator[AdmissionSlot]:
        """Hold a place while the body runs, after waiting for it if need be.

        Raises:
            ResourceExhaustedError: the queue, or the client's part of it, is full; says when to try again.
        """
        place = AdmissionSlot(self, client)
        await place.take(has_begun=False)
        try:
            yield place
        finally:
            place.leave()

    # --- for `AdmissionSlot` -----------------------------------------------------------------------------

    async def wait(self, client: Principal, *, has_begun: bool) -> None:
        """Until one more generation of the client may run. Errors as for `place`."""
        if self._may_start(client):  # who waits in spite of a free place has reached a limit of its own
            self._start(client.name)
            return
        if not has_begun:
            self._make_room(client)
        await self._line_up(_Entry(client, has_begun))

    def release(self, client: Principal, turn_s: float) -> None:
        """One that has run for so long, in seconds, does not any more."""
        self._mean_turn_s += _SMOOTHING * (turn_s - self._mean_turn_s)
        self._release(client.name)

    @contextlib.contextmanager
    def paused(self, place: AdmissionSlot) -> Iterator[None]:
        """Count one more as paused while the body runs, if need be in place of another."""
        self._paused.append(place)
        if self.num_paused > self._max_running + self._max_waiting:
            self._end_one_pause()
        try:
            yield
        finally:
            if place in self._paused:
                self._paused.remove(place)

    # --------------------------------------------------------------------------------------------------

    def _may_start(self, client: Principal) -> bool:
        within_own = client.max_running is None or self._running[client.name] < client.max_running
        return within_own and self.num_running < self._max_running

    def _make_room(self, client: Principal) -> None:
        """For one more that waits."""
        new = [entry for entry in self._waiting if not entry.has_begun]
        if client.max_waiting is not None:
            num_own = sum(entry.client.name == client.name for entry in new)
            if num_own >= client.max_waiting:
                raise self._full(
                    f"{self._running[client.name]} generations of {client.name} run, {num_own} wait"
                )
        if len(new) >= self._max_waiting:
            self._refuse_one(client.name, new)

    async def _line_up(self, entry: _Entry) -> None:
        self._waiting.append(entry)
        try:
            await entry.admitted
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry.admitted.done() and not entry.admitted.cancelled() and not entry.admitted.exception():
                self._release(entry.client.name)  # admitted in the same moment
            raise

    def _refuse_one(self, client: str, entries: Sequence[_Entry]) -> None:
        """Make room in the queue, at the cost of the client that fills it most."""
        counts = Counter(entry.client.name for entry in entries)
        greediest, most = counts.most_common(1)[0] if counts else (client, 0)
        if counts[client] + 1 >= most:
            raise self._full()
        newest = next(entry for entry in reversed(entries) if entry.client.name == greediest)
        self._waiting.remove(newest)
        newest.admitted.set_exception(self._full())

    def _end_one_pause(self) -> None:
        counts = Counter(place.client.name for place in self._paused)
        most = counts.most_common(1)[0][0]
        longest = next(place for place in self._paused if place.client.name == most)
        self._paused.remove(longest)
        longest.end_pause()

    def _full(self, why: str = "") -> ResourceExhaustedError:
        wait_ms = 1e3 * self._mean_turn_s * (self.num_waiting + 1) / self._max_running
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
