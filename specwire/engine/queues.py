"""Jobs that have started and not ended. Used by the engine thread alone; others may read lengths."""

from __future__ import annotations

from collections.abc import Iterator

from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.replies import Replies
from specwire.errors import RequestCancelledError


class JobQueues:
    """Jobs in order of arrival.

    Args:
        replies: informed of the jobs that fail here.

    Attributes:
        foreground: jobs that a caller waits for.
        background: jobs that work ahead on what may be requested.
    """

    def __init__(self, replies: Replies) -> None:
        self.foreground: list[Job] = []
        self.background: list[Job] = []
        self._replies = replies

    def __iter__(self) -> Iterator[Job]:
        yield from self.foreground
        yield from self.background

    def __len__(self) -> int:
        return len(self.foreground) + len(self.background)

    def add(self, job: Job, *, background: bool) -> None:
        """A job that has started."""
        (self.background if background else self.foreground).append(job)

    def promote(self, job: Job) -> None:
        """Move a background job to the foreground."""
        if job in self.background:
            self.background.remove(job)
            self.foreground.append(job)

    def cancel(self, sequence: TokenSequence, reason: str) -> None:
        """Fail all jobs of a sequence."""
        self.foreground = self._without(self.foreground, sequence, reason)
        self.cancel_background(sequence, reason)

    def cancel_background(self, sequence: TokenSequence, reason: str) -> None:
        """Fail the background jobs of a sequence."""
        if self.background:
            self.background = self._without(self.background, sequence, reason)

    def fail_background(self, error: Exception) -> None:
        """Fail all background jobs."""
        for job in self.background:
            self._replies.fail(job, error)
        self.background = []

    def fail_all(self, error: Exception) -> None:
        """Fail every job."""
        for job in self:
            self._replies.fail(job, error)
        self.foreground, self.background = [], []

    def remove_done(self) -> None:
        """Drop the jobs that have a result."""
        self.foreground = [job for job in self.foreground if not job.done]
        self.background = [job for job in self.background if not job.done]

    def _without(self, jobs: list[Job], sequence: TokenSequence, reason: str) -> list[Job]:
        for job in jobs:
            if job.sequence is sequence:
                self._replies.fail(job, RequestCancelledError(reason))
        return [job for job in jobs if job.sequence is not sequence]
