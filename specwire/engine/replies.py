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

Result = tuple[Job, Any]
Sink = Callable[[Sequence[Result]], None]
"""Takes jobs with their results, or with the errors that they failed with. Must not raise."""


class Replies:
    """Hands results from the engine thread to the event loops of their callers, each exactly once."""

    def __init__(self) -> None:
        self._pending: dict[Job, tuple[asyncio.AbstractEventLoop, Sink]] = {}  # event loops only
        self._resolved: list[Result] = []  # engine thread only
        self._loops: set[asyncio.AbstractEventLoop] = set()

    # --- called from the event loop ---

    def expect(self, job: Job, sink: Sink) -> None:
        """The sink is called, on this event loop, with all results that are there at the same time."""
        loop = asyncio.get_running_loop()
        self._loops.add(loop)
        self._pending[job] = loop, sink

    @property
    def num_pending(self) -> int:
        """Jobs without a result."""
        return len(self._pending)

    def fail_pending(self, error: Exception) -> None:
        """Fail all jobs without a result at once, without the engine thread, which may be blocked."""
        self._settle([(job, error) for job in self._pending])

    def _settle(self, results: Sequence[Result]) -> None:
        here, by_sink, nothing = (
            asyncio.get_running_loop(),
            defaultdict[Sink, list[Result]](list),
            (None, None),
        )
        for result in results:
            loop, sink = self._pending.get(result[0], nothing)
            if loop is here and sink is not None:
                del self._pending[result[0]]
                by_sink[sink].append(result)
        for sink, own in by_sink.items():
            sink(own)

    # --- on the engine thread ---

    def resolve(self, jobs: Sequence[Job]) -> None:
        """These have their results; their callers get them with the next `flush`."""
        self._resolved += [(job, job.result) for job in jobs]

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
        resolved, self._resolved = self._resolved, []
        for loop in list(self._loops):
            if loop.is_closed():
                self._loops.discard(loop)
            else:
                loop.call_soon_threadsafe(self._settle, resolved)


def into_future(future: asyncio.Future[Any]) -> Sink:
    """A sink for one job, whose result goes into a future."""

    def settle(results: Sequence[Result]) -> None:
        [(_, result)] = results
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    return settle
