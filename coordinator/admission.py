"""Which generations run now, which wait, and which are refused with a time to retry. Knows no grpc.

A free slot goes to the client with the fewest running generations; among equals to the one served least
recently. When the queue is full, the client with most entries in it loses its newest one, so a thousand
requests of one client never keep out one of another. A client may have limits of its own: requests over them
wait or are refused while there is room for others.

A generation that waits for its client releases its slot, and queues again when the client reads on:

    arrives ──▶ waits ──▶ runs ──▶ paused ──▶ waits ──▶ runs ──▶ ends

It is never refused then: the limits on waiting are for generations that have not begun. As many may be
paused as may run and wait; one more, and the client with most of them loses the one paused the longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from specwire.config.security.bearer import Principal
from specwire.errors import ResourceExhaustedError, StreamIdleError

_MIN_RETRY_MS, _MAX_RETRY_MS = 50, 10_000
_SMOOTHING = 0.1


@dataclass(eq=False)
class _Entry:
    client: Principal
    has_begun: bool
    turn: int
    """The last but one as it began to wait: a client of which nothing is known counts as served then."""
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdmissionSlot:
    """What a generation holds while it runs. Made by `Admission.slot`; for one task."""

    def __init__(self, admission: Admission, client: Principal) -> None:
        self._admission = admission
        self.client = client
        self._acquired_s: float | None = None
        self.pause = asyncio.timeout(None)

    async def acquire(self, *, has_begun: bool) -> None:
        """Wait for it. Errors as for `Admission.slot`."""
        await self._admission.wait(self.client, has_begun=has_begun)
        self._acquired_s = time.monotonic()

    def release(self) -> None:
        """Pass it on to the next generation; does nothing if it is not held."""
        if self._acquired_s is not None:
            turn_s, self._acquired_s = time.monotonic() - self._acquired_s, None
            self._admission.release(self.client, turn_s)

    @contextlib.asynccontextmanager
    async def released(self) -> AsyncIterator[None]:
        """Release it while the body waits for the client; then wait for one again.

        Raises:
            StreamIdleError: too many are paused, and this one for the longest time.
        """
        self.release()
        try:
            async with asyncio.timeout(None) as self.pause:
                with self._admission.paused(self):
                    yield
        except TimeoutError:
            raise StreamIdleError("too many streams are paused, this one for the longest time") from None
        await self.acquire(has_begun=True)


class Admission:
    """Limits on running, waiting and paused generations, fair between clients.

    Attributes:
        num_running: generations running.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        self.num_running = 0  # the sum, which every round asks for
        self._waiting: list[_Entry] = []
        self._paused: list[AdmissionSlot] = []  # the longest pause comes first
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0
        self._mean_turn_s = 1.0

    @property
    def num_waiting(self) -> int:
        """Generations waiting for a slot."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Generations without a slot, waiting for their clients."""
        return len(self._paused)

    @contextlib.asynccontextmanager
    async def slot(self, client: Principal) -> AsyncIterator[AdmissionSlot]:
        """Hold a slot while the body runs, after waiting for it if necessary.

        Raises:
            ResourceExhaustedError: the queue, or the client's part of it, is full; names a time to retry.
        """
        slot = AdmissionSlot(self, client)
        await slot.acquire(has_begun=False)
        try:
            yield slot
        finally:
            slot.release()

    # --- for `AdmissionSlot` -----------------------------------------------------------------------------

    async def wait(self, client: Principal, *, has_begun: bool) -> None:
        """Until one more generation of the client may run. Errors as for `slot`."""
        if self._may_start(client):  # entries that wait despite a free slot are at limits of their own
            self._start(client.name)
            return
        if not has_begun:
            self._make_room(client)
        entry = _Entry(client, has_begun, self._num_turns - 1)
        self._waiting.append(entry)
        try:
            await entry.admitted
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry.admitted.done() and not entry.admitted.cancelled() and not entry.admitted.exception():
                self._release(client.name)  # it was admitted just before it was cancelled
            self._forget(client.name)
            raise

    def release(self, client: Principal, turn_s: float) -> None:
        """A generation of the client stops running after `turn_s` seconds."""
        self._mean_turn_s += _SMOOTHING * (turn_s - self._mean_turn_s)
        self._release(client.name)

    @contextlib.contextmanager
    def paused(self, slot: AdmissionSlot) -> Iterator[None]:
        """Count one more as paused while the body runs; over the limit, another pause ends."""
        self._paused.append(slot)
        if self.num_paused > self._max_running + self._max_waiting:
            greediest = Counter(each.client.name for each in self._paused).most_common(1)[0][0]
            longest = next(each for each in self._paused if each.client.name == greediest)
            self._paused.remove(longest)
            longest.pause.reschedule(asyncio.get_running_loop().time())  # `released` raises then
        try:
            yield
        finally:
            if slot in self._paused:
                self._paused.remove(slot)

    # --------------------------------------------------------------------------------------------------

    def _may_start(self, client: Principal) -> bool:
        within_own = client.max_running is None or self._running[client.name] < client.max_running
        return within_own and self.num_running < self._max_running

    def _make_room(self, client: Principal) -> None:
        """For one more that waits."""
        # One that was cancelled in this turn of the loop is still listed, and waits no more.
        new = [entry for entry in self._waiting if not (entry.has_begun or entry.admitted.done())]
        if client.max_waiting is not None:
            num_own = sum(entry.client.name == client.name for entry in new)
            if num_own >= client.max_waiting:
                raise self._full(
                    f"{self._running[client.name]} generations of {client.name} run, {num_own} wait"
                )
        if len(new) >= self._max_waiting:
            # At the expense of the client with most entries.
            counts = Counter(entry.client.name for entry in new)
            greediest, most = counts.most_common(1)[0] if counts else (client.name, 0)
            if counts[client.name] + 1 >= most:
                raise self._full()
            newest = next(entry for entry in reversed(new) if entry.client.name == greediest)
            self._waiting.remove(newest)
            self._forget(greediest)
            newest.admitted.set_exception(self._full())

    def _full(self, why: str = "") -> ResourceExhaustedError:
        wait_ms = 1e3 * self._mean_turn_s * (self.num_waiting + 1) / self._max_running
        retry_after_ms = int(min(max(wait_ms, _MIN_RETRY_MS), _MAX_RETRY_MS))
        why = why or f"{self.num_running} generations run, {self.num_waiting} wait"
        return ResourceExhaustedError(f"{why}; try again in {retry_after_ms} ms", retry_after_ms)

    def _start(self, client: str) -> None:
        self._running[client] += 1
        self.num_running += 1
        self._num_turns += 1
        self._last_turn[client] = self._num_turns

    def _release(self, client: str) -> None:
        self._running[client] -= 1
        self.num_running -= 1
        while ready := [entry for entry in self._waiting if self._may_start(entry.client)]:
            # Entries of one client keep their order.
            entry = min(
                ready,
                key=lambda each: (
                    self._running[each.client.name],
                    self._last_turn.get(each.client.name, each.turn),
                ),
            )
            self._waiting.remove(entry)
            if not entry.admitted.done():
                self._start(entry.client.name)
                entry.admitted.set_result(None)
        if not self._running[client]:
            del self._running[client]
            self._forget(client)

    def _forget(self, client: str) -> None:
        """A client of which nothing runs or waits."""
        if client not in self._running and all(entry.client.name != client for entry in self._waiting):
            self._last_turn.pop(client, None)
