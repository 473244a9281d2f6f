"""Jobs that have started and not ended. Used by the engine thread alone; others may read lengths.

What concerns one job or one sequence visits no others: under load there are thousands of background jobs, and
every round of every stream closes forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.replies import Replies
from specwire.errors import RequestCancelledError


class JobQueues:
    """Jobs in order of arrival; replies are informed of those that fail here.

    Attributes:
        foreground: jobs that a caller waits for, as keys.
        background: jobs that work ahead on what may be requested, as keys.
        num_going_on: of these, that are most likely needed.
    """

    def __init__(self, replies: Replies) -> None:
        self.foreground: dict[Job, None] = {}
        self.background: dict[Job, None] = {}
        self.num_going_on = 0
        self._jobs_of: dict[TokenSequence, list[Job]] = {}
        self._replies = replies

    def __iter__(self) -> Iterator[Job]:
        yield from self.foreground
        yield from self.background

    def __len__(self) -> int:
        return len(self.foreground) + len(self.background)

    def add(self, job: Job, *, background: bool) -> None:
        (self.background if background else self.foreground)[job] = None
        self.num_going_on += background and job.goes_on
        self._jobs_of.setdefault(job.sequence, []).append(job)

    def promote(self, job: Job) -> None:
        """Move a background job to the foreground."""
        if job in self.background:
            del self.background[job]
            self.num_going_on -= job.goes_on
            self.foreground[job] = None

    def move(self, sequence: TokenSequence, to: TokenSequence) -> None:
        """Make the jobs of a sequence those of another."""
        if jobs := self._jobs_of.pop(sequence, None):
            for job in jobs:
                job.sequence = to
            self._jobs_of.setdefault(to, []).extend(jobs)

    def cancel(self, sequence: TokenSequence, reason: str) -> None:
        self.fail(self._jobs_of.get(sequence, ()), RequestCancelledError(reason))

    def cancel_background(self, sequence: TokenSequence, reason: str) -> None:
        if jobs := self._jobs_of.get(sequence):
            self.fail([job for job in jobs if job in self.background], RequestCancelledError(reason))

    def fail(self, jobs: Iterable[Job], error: Exception) -> None:
        jobs = [*jobs]
        self.remove(jobs)
        for job in jobs:
            self._replies.fail(job, error)

    def remove(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            is_background = job in self.background
            (self.background if is_background else self.foreground).pop(job)
            self.num_going_on -= is_background and job.goes_on
            own = self._jobs_of[job.sequence]
            own.remove(job)
            if not own:
                del self._jobs_of[job.sequence]
