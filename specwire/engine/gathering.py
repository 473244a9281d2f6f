"""Whether the next step waits a moment for streams that are about to send their next job.

Without it streams fall into groups that take turns, and each waits for the steps of all groups. One group
instead of two saves what a step costs beside its tokens, so waiting is worth at most that.
"""

from __future__ import annotations

from collections.abc import Sequence

from specwire import clock
from specwire.engine.jobs import Job, TokenSequence


class Gathering:
    """The streams that a step waits for; engine thread only.

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
