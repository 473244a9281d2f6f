"""What the batching loop works with: the device, which is a model in this process or a group of ranks, and
what a service has it do before, between and after passes.

    loop                          device
    question = ask(jobs)  ──▶     logits = forward(feeds)
    apply(jobs, answer)   ◀──     answer = decide(question, logits)

Logits stay on the device. A question holds what `decide` needs for each row, an answer holds its results:
both are small and can be pickled, because the device may be in other processes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from specwire.engine.batch import Feed
from specwire.engine.cache.kv_cache import PagePool, SequenceCache
from specwire.engine.jobs import Job
from specwire.proposals.estimate.costs import CostModel
from specwire.support import IntArray

Decide = Callable[[Any, Tensor], Any]
"""Takes a question and its logits [sum of num_rows, vocab_size]; returns the answer. Pickled by name."""


class DraftCost(NamedTuple):
    """What was drafted after the verdicts of a step, in the same process.

    Attributes:
        num_passes: one after another, of whatever drafts.
        num_nodes: that these ran, of all sequences.
        num_hosted: passes after which the host chose tokens, where the device can choose those of chains.
        spent_ns, prefill_ns: for all passes, and before them for beginnings of sequences.
    """

    num_passes: int = 0
    num_nodes: int = 0
    num_hosted: int = 0
    spent_ns: int = 0
    prefill_ns: int = 0


NO_DRAFTING = DraftCost()


class DraftShape(NamedTuple):
    """What is known of a target's own drafts beside its device.

    Attributes:
        vocab_size: tokens that are ever drafted.
        masks: token ids that stand for draft tokens of a block, after the last token.
        longest: most draft tokens on a path; 0 for any number.
        share_read: of the weights that a pass of the target reads, what one of the draft does; 0 where it
            has its own.
    """

    vocab_size: int
    masks: tuple[int, ...] = ()
    longest: int = 0
    share_read: float = 0.0


class DraftQuery(NamedTuple):
    """Nodes of proposals whose logits are wanted: all that begin together, or children of nodes before.

    Attributes:
        is_first: whether proposals begin: the nodes are the last tokens of their sequences.
        rows: int64 [num_nodes]; of a first one, the row of the target's pass that it follows, else the place
            of its parent among all nodes since the first ones.
        token_ids, depths: int64 [num_nodes], of each node.
    """

    is_first: bool
    rows: IntArray
    token_ids: IntArray
    depths: IntArray


class StepHook(Protocol):
    """Does something before each step."""

    def load(self, vocab_size: int) -> None:
        """Called once, on the engine's thread, when a model with so many tokens is loaded.

        Raises:
            ModelLoadError: what it needs cannot be loaded.
        """

    def before_step(self, jobs: Sequence[Job], costs: CostModel) -> None:
        """Called on the engine's thread, before a step is planned.

        Args:
            jobs: all that may be in the step.
            costs: of a step without this call.
        """


class SpareWork(Protocol):
    """Work in short pieces that no request waits for. All of it is called on the engine's thread, but for
    `version`.

    Attributes:
        version: of the model's weights: pages that were computed with others are not found by new sequences.
        usual_s: what a piece usually takes; 0 before the first one.
    """

    version: int
    usual_s: float

    def wait_s(self) -> float | None:
        """How long until a piece is due, 0 if one is; None while there is nothing to do."""

    def do(self) -> None:
        """One piece; must not raise."""


class Decider(Protocol):
    """How a service turns logits into results."""

    drafting: DraftCost
    """Of the last `apply`: no part of what the pass cost."""

    def ask(self, jobs: Sequence[Job]) -> Any:
        """The question for jobs whose rows are complete; has no side effects."""

    def decide(self, question: Any, logits: Tensor) -> Any:
        """See `Decide`."""

    def apply(self, jobs: Sequence[Job], answer: Any) -> None:
        """Set `result` of each job, or append to its sequence's tokens, which requests another pass."""


class Runner(abc.ABC):
    """A device, as the loop uses it; by default one that is never lost without this process."""

    pool: PagePool
    vocab_size: int
    on_loss: Callable[[], None] = staticmethod(lambda: None)
    """Set by the engine; called from any thread when the device is lost between passes."""
    longest_pause_s: float
    """Rare extra time of a pass, in seconds: to record a graph, or to detect a lost rank."""

    def new_sequence(self) -> SequenceCache:
        """An empty sequence of this runner's cache; the caller releases it."""
        return self.pool.new_sequence()

    @abc.abstractmethod
    def run(self, feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        """One forward pass; the answer, or None when the question is None.

        Raises:
            DeviceLostError: the contents of all caches are lost.
        """

    def end_step(self) -> None:  # noqa: B027 - an answer on the host implies it
        """Wait until the device has finished the step; called after its answer was applied."""

    def check(self) -> None:  # noqa: B027
        """Raises DeviceLostError as `run` does."""

    def recover(self, is_wanted: Callable[[], bool]) -> None:  # noqa: B027
        """Restart the device, with empty caches, after a DeviceLostError; gives up once it is not wanted.

        Raises:
            SpecwireError: it did not start; the next call tries again.
        """

    def close(self) -> None:  # noqa: B027
        """Free all resources; called once, from any thread, while nothing runs or waits."""


class DeviceLostError(Exception):
    """A part of the device died and its memory is lost; not an error of the jobs of the step."""
