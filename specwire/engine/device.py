"""The seam between the batching loop and whatever computes: a model in this process, a group of ranks.

    loop                          device
    question = ask(jobs)  ──▶     logits = forward(feeds)
    apply(jobs, answer)   ◀──     answer = decide(question, logits)

Logits stay where they are made. A question says of each row what `decide` must know, an answer is what came
of it: both are small, and can be pickled, because the device may be in other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from specwire.engine.batch import Feed
from specwire.engine.cache.kv_cache import PagePool, SequenceCache
from specwire.engine.jobs import Job

Decide = Callable[[Any, Tensor], Any]
"""Takes a question and its logits [sum of num_rows, vocab_size]; returns the answer. Pickled by name."""


class Decider(Protocol):
    """What a service makes of logits."""

    def ask(self, jobs: Sequence[Job]) -> Any:
        """The question for jobs whose rows are complete; changes nothing."""

    def decide(self, question: Any, logits: Tensor) -> Any:
        """See `Decide`."""

    def apply(self, jobs: Sequence[Job], answer: Any) -> None:
        """Set `result` of each job, or append to its sequence's tokens and so ask for another pass."""


class Runner(Protocol):
    """What the loop needs of a device."""

    pool: PagePool
    vocab_size: int
    on_loss: Callable[[], None]
    """To be called, from any thread, when `check` began to raise while nobody ran anything."""
    longest_pause_s: float
    """What a pass may take beside its work, seldom: to record a graph, to notice that a rank is lost."""

    def new_sequence(self) -> SequenceCache: ...

    def run(self, feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        """One forward pass; the answer, or None when the question is None.

        Raises:
            DeviceLostError: what all caches held is gone.
        """

    def end_step(self) -> None:
        """Wait for what the device still does of the step, once its answer was applied."""

    def check(self) -> None:
        """Raises:
        DeviceLostError: as for `run`.
        """

    def recover(self, is_wanted: Callable[[], bool]) -> None:
        """Bring an empty device back after a DeviceLostError, as long as it is wanted.

        Raises:
            SpecwireError: it cannot be had; the next call tries again.
        """

    def close(self) -> None:
        """Give everything back; called once, from any thread, while nothing runs or waits."""


class DeviceLostError(Exception):
    """A part of the device died; its memory is lost, and the jobs of the step are not to blame."""


class LogitsDecider:
    """Hands over the logits themselves: for consumers that look at all of them, in tests and simulations.

    Args:
        consume: takes the jobs of a step whose rows are complete, and their logits.
    """

    def __init__(self, consume: Callable[[list[Job], Any], None]) -> None:
        self._consume = consume

    def ask(self, jobs: Sequence[Job]) -> int:
        """See `Decider`."""
        return len(jobs)

    @staticmethod
    def decide(question: int, logits: Tensor) -> Tensor:
        """See `Decider`."""
        return logits

    def apply(self, jobs: Sequence[Job], answer: Tensor) -> None:
        """See `Decider`."""
        self._consume(list(jobs), answer)
