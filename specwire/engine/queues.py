"""Jobs that have started and not ended, and streams whose next job is waited for. Used by the engine thread
alone; others may read lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from specwire import clock
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.replies import Replies
from specwire.errors import RequestCancelledError


class JobQueues:
    """Jobs in order of arrival; replies are informed of those that fail here.

    What concerns one job or one sequence visits no others: under load there are thousands of background jobs,
    and every round of every stream closes forks.

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


class Gathering:
    """Whether the next step waits a moment for streams that are about to send their next job.

    Without it streams fall into groups that take turns, and each waits for the steps of all groups. One group
    instead of two saves what a step costs beside its tokens, so waiting is worth at most that.

    Attributes:
        expected: sequences that were answered by the last step and usually return in time.
    """

    def __init__(self) -> None:
        self.expected: set[TokenSequence] = set()
        self._deadline_ns = 0

    def expect(self, answered: Sequence[TokenSequence], patience_ns: int, now_ns: int) -> None:
        """These sequences were answered now; no wait beyond `patience_ns` can be worth its time."""
        for sequence in answered:
            sequence.answered_ns = now_ns
        self.expected = {sequence for sequence in answered if 0 < sequence.turnaround_ns <= patience_ns}
        longest_ns = max((sequence.turnaround_ns for sequence in self.expected), default=0)
        self._deadline_ns = now_ns + min(patience_ns, 2 * longest_ns)

    def arrived(self, job: Job) -> None:
        """A foreground job arrived: measure its stream's turnaround, and stop waiting for it."""
        sequence = job.sequence
        if sequence.answered_ns:
            sequence.turnaround_ns = job.arrived_ns - sequence.answered_ns
        self.expected.discard(sequence)

    def remaining_s(self) -> float:
        """How long the next step may still wait, in seconds."""
        return max(0, self._deadline_ns - clock.stopwatch_ns()) / 1e9 if self.expected else 0.0
