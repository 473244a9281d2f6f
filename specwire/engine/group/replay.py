"""Captured steps in a group: either all ranks replay a step, or none does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specwire.engine.model.runner import ModelRunner
from specwire.rule.captured import Output, Replay


class AgreedReplay:
    """Captures a step only if all ranks can.

    NCCL requires that a collective is captured by all ranks of a group or by none. Buckets follow from the
    batch alone, so all ranks use the same buckets in the same order, and capture at the same time. They
    exchange results through the store, not the group, which a failed capture may have left unusable.

    Args:
        replay: how one rank captures.
        store: shared by all ranks of the group; reads wait for missing keys.

    Attributes:
        problem: why steps are no longer captured, from the first rank that reports one; else empty.
    """

    def __init__(self, replay: Replay, store: Any, rank: int, num_ranks: int) -> None:
        self._replay, self._store = replay, store
        self._rank, self._num_ranks = rank, num_ranks
        self._number = 0
        self.problem = ""

    def capture(self, run: Callable[[], Output]) -> Callable[[], Output]:
        """See `Replay`.

        Raises:
            RuntimeError: some rank failed to capture; raised on all ranks.
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
        """Warm up a runner; if the ranks end up in different states, none of them replays."""
        runner.warm()
        found = self._exchange(f"{runner.num_graphs} recorded, {runner.attention_path}")
        if len(set(found)) > 1:
            self.problem = f"ranks differ: {', '.join(found)}"
        if self.problem:
            runner.stop_replaying()

    def _exchange(self, text: str) -> list[str]:
        """The texts of all ranks, in order."""
        self._number += 1
        self._store.set(f"{self._number}/{self._rank}", text)
        ranks = range(self._num_ranks)
        return [self._store.get(f"{self._number}/{rank}").decode() for rank in ranks]
