"""Recovery from a lost device: every sequence runs its tokens again, which callers notice as a delay only."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence

from specwire.engine.device import DeviceLostError, Runner
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.progress import Heartbeat
from specwire.engine.queues import JobQueues
from specwire.engine.replies import Replies
from specwire.errors import ServiceUnavailableError, SpecwireError

log = logging.getLogger(__name__)

_MAX_LOSSES = 2
"""A job that was running when the device was lost more often than this fails: it may be the cause."""


class DeviceRecovery:
    """Brings a lost device back; engine thread only.

    Args:
        sequences: all open ones; the caller's own, and it may change.
        is_wanted: False once the engine is shutting down.
    """

    def __init__(
        self,
        runner: Runner,
        sequences: Collection[TokenSequence],
        queues: JobQueues,
        replies: Replies,
        heartbeat: Heartbeat,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._runner = runner
        self._sequences = sequences
        self._queues = queues
        self._replies = replies
        self._heartbeat = heartbeat
        self._is_wanted = is_wanted

    def check(self) -> None:
        """Recover now if the device was lost while nothing was running."""
        try:
            self._runner.check()
        except DeviceLostError as error:
            self.recover((), error)

    def recover(self, jobs: Sequence[Job], error: DeviceLostError) -> None:
        """The contents of all caches are lost: empty them, and wait for the device.

        Args:
            jobs: the jobs of the step that was lost.
        """
        log.warning("%s; sequences run their tokens again on a new device", error)
        for job in jobs:
            job.num_losses += 1
            if job.num_losses > _MAX_LOSSES:
                problem = f"the device was lost, {job.num_losses} times at this request"
                self._replies.fail(job, ServiceUnavailableError(problem))
        self._restart_device()
        self._queues.remove_done()
        self._replies.flush()

    def _restart_device(self) -> None:
        self._heartbeat.beat(least_s=math.inf)  # the runner bounds its own recovery
        for sequence in list(self._sequences):
            sequence.cache.truncate(0)
        self._runner.pool.forget_all()
        try:
            self._runner.recover(self._is_wanted)
        except SpecwireError as error:
            log.error("the device did not come back: %s", error)
            self._queues.fail_all(ServiceUnavailableError("the device did not come back"))
