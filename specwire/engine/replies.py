"""The futures that callers wait for: one a job, created on the event loop, resolved on the engine thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from specwire.engine.jobs import Job
from specwire.errors import InternalError, SpecwireError

log = logging.getLogger(__name__)


class Replies:
    """Hands results from the engine thread to the event loops of their callers."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Future[Any]] = set()  # event loop only
        self._resolved: list[tuple[asyncio.Future[Any], Any]] = []  # engine thread only

    # --- called from the event loop ---

    def expect(self, job: Job) -> asyncio.Future[Any]:
        """A new future for the job's result."""
        # Keep it in a variable: the engine thread may take it off the job before this returns.
        future = job.future = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    @property
    def num_pending(self) -> int:
        """Futures without a result."""
        return len(self._pending)

    def fail_pending(self, error: Exception) -> None:
        """Fail all futures without a result at once, without the engine thread, which may be blocked."""
        for future in list(self._pending):
            if not future.done():
                future.set_exception(error)

    # --- on the engine thread ---

    def resolve(self, job: Job) -> None:
        """The job has its result; the caller gets it with the next `flush`."""
        if job.future is not None:
            self._resolved.append((job.future, job.result))
            job.future = None

    def fail(self, job: Job, error: Exception) -> None:
        """End the job with an error; one that is not ours is logged, and hidden from the caller."""
        if not isinstance(error, SpecwireError):
            log.error("a forward pass failed", exc_info=error)
            error = InternalError("the forward pass failed; the service's log has the details")
        job.result = error
        self.resolve(job)

    def flush(self) -> None:
        """Send all results at once: waking an event loop costs more than a result does."""
        resolved, self._resolved = self._resolved, []
        for loop in {future.get_loop() for future, _ in resolved}:
            own = [(future, result) for future, result in resolved if future.get_loop() is loop]
            loop.call_soon_threadsafe(_settle, own)


def _settle(resolved: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in resolved:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
