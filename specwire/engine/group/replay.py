"""Recorded steps in a group: all ranks replay a step, or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specwire.engine.model.graphs import Replay
from specwire.engine.model.runner import ModelRunner


class AgreedReplay:
    """Records what all ranks can record.

    NCCL wants a collective recorded by all ranks of a group or by none of them. Ranks meet the same buckets
    in the same order, since those follow from the batch alone: so they come here together. What they tell
    each other goes through the store, not the group, which a failed recording may have left unusable.

    Args:
        replay: how one rank records.
        store: of all ranks of the group; waits for what is not there yet.

    Attributes:
        problem: why nothing is recorded any more, by the first rank that says so; else empty.
    """

    def __init__(self, replay: Replay, store: Any, rank: int, num_ranks: int) -> None:
        self._replay, self._store = replay, store
        self._rank, self._num_ranks = rank, num_ranks
        self._number = 0
        self.problem = ""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Replay`.

        Raises:
            RuntimeError: some rank could not; all raise it alike.
        """
        recorded, problem = None, ""
        try:
            recorded = self._replay.capture(run)
        except Exception as error:
            problem = f"rank {self._rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        self.problem = next(filter(None, self._exchange(problem)), "")
        if self.problem or recorded is None:
            raise RuntimeError(self.problem)
        return recorded

    def warm(self, runner: ModelRunner) -> None:
        """Let a runner record what one stream needs; unless all ranks end up alike, none of them replays."""
        runner.warm()
        found = self._exchange(f"{runner.num_graphs} recorded, {runner.attention_path}")
        if len(set(found)) > 1:
            self.problem = f"ranks differ: {', '.join(found)}"
        if self.problem:
            runner.stop_replaying()

    def _exchange(self, text: str) -> list[str]:
        """What all ranks say, in order."""
        self._number += 1
        self._store.set(f"{self._number}/{self._rank}", text)
        ranks = range(self._num_ranks)
        return [self._store.get(f"{self._number}/{rank}").decode() for rank in ranks]
