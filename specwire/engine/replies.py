"""Results on their way to callers: handed in by the engine thread, received on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from specwire.engine.jobs import Job
from specwire.errors import InternalError, SpecwireError

log = logging.getLogger(__name__)

_MOST_HELD_NS = 16_000_000
"""How long results that nobody waits for may be held: a frame of a screen, so that no reader sees it. Each
wakes the event loop, for whose Python the next pass waits. Tokens/s of the embedded target with 0, 8 and 16
ms, plain: one stream 252, 320 and 358; four 709 and 851 (0 and 16); sixteen 1,465 and 1,600."""

Result = tuple[Job, Any]
Sink = Callable[[Sequence[Result]], None]
"""Takes jobs with their results, or with the errors that they failed with. Must not raise."""


class Replies:
    """Hands results from the engine thread to the event loop of their callers, each exactly once."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[Job, Sink] = {}  # event loop only
        self._resolved: list[list[Result]] = []  # of one pass after another; engine thread only
        self._held_since_ns = 0  # engine thread only; 0 if nothing is held

    # --- called from the event loop ---

    def expect(self, job: Job, sink: Sink) -> None:
        """The sink is called, on this event loop, with all results that are there at the same time."""
        self._loop = asyncio.get_running_loop()
        self._pending[job] = sink

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def fail_pending(self, error: Exception) -> None:
        """Fail all jobs without a result at once, without the engine thread, which may be blocked."""
        self._settle([[(job, error) for job in self._pending]])

    def _settle(self, passes: Sequence[Sequence[Result]]) -> None:
        for results in passes:  # what a sink takes may make it expect a job of the next pass
            by_sink = defaultdict[Sink, list[Result]](list)
            for result in results:
                if sink := self._pending.pop(result[0], None):
                    by_sink[sink].append(result)
            for sink, own in by_sink.items():
                sink(own)

    # --- on the engine thread ---

    def resolve(self, jobs: Sequence[Job]) -> None:
        """These have their results; their callers get them with the next `flush`."""
        if jobs:
            self._resolved.append([(job, job.result) for job in jobs])

    @property
    def is_held(self) -> bool:
        """Whether what is there waits for what another pass adds."""
        return self._held_since_ns > 0

    def hold(self, now_ns: int, pass_ns: int) -> None:
        """Nobody waits for what was resolved: flush once another pass would keep it too long."""
        self._held_since_ns = self._held_since_ns or now_ns
        if now_ns + pass_ns - self._held_since_ns > _MOST_HELD_NS:
            self.flush()

    def fail(self, job: Job, error: Exception) -> None:
        """End the job with an error; one that is not ours is logged, and hidden from the caller."""
        if not isinstance(error, SpecwireError):
            log.error("a forward pass failed", exc_info=error)
            error = InternalError("the forward pass failed; the service's log has the details")
        job.result = error
        self.resolve([job])

    def flush(self) -> None:
        """Send all results at once: waking an event loop costs more than a result does."""
        if not self._resolved:
            return
        resolved, self._resolved, self._held_since_ns = self._resolved, [], 0
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, resolved)
