"""Paces a model: real logits, and a minimum time for every pass, like that of a larger model on its device.

A pass computes the same as without it. If it is faster than the minimum the rest of the time is slept, and
the processor is free for other work. So a small machine can show the effect of speculation on a large target.
All passes take the same time, as they do where reading the weights dominates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from specwire.engine.batch import Feed
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.device import Decide, DraftQuery, DraftShape, Runner


class PacedRunner:
    """A `device.Runner` around another one.

    Args:
        least_pass_s: minimum time of a pass, deciding on its logits included, in seconds. What is drafted
            after it takes its own time.
    """

    def __init__(self, runner: Runner, least_pass_s: float) -> None:
        self.pool = runner.pool
        self.vocab_size = runner.vocab_size
        self.longest_pause_s = runner.longest_pause_s
        self._runner = runner
        self._drafting_runner: Any = runner  # where it drafts, too
        self.context_len = getattr(runner, "context_len", None)
        self._least_pass_s = least_pass_s

    @property
    def on_loss(self) -> Callable[[], None]:
        """See `device.Runner`."""
        return self._runner.on_loss

    @on_loss.setter
    def on_loss(self, call: Callable[[], None]) -> None:
        self._runner.on_loss = call

    @property
    def drafting(self) -> Any:
        """The runner of a target's draft model; None without."""
        return getattr(self._runner, "drafting", None)

    @property
    def draft_shape(self) -> DraftShape | None:
        """See `DraftingRunner`."""
        return getattr(self._runner, "draft_shape", None)

    def new_sequence(self) -> SequenceCache:
        """See `device.Runner`."""
        return self._runner.new_sequence()

    def run(self, feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        """See `device.Runner`."""
        due_s = time.perf_counter() + self._least_pass_s
        answer = self._runner.run(feeds, question, decide)
        _sleep_until(due_s)
        return answer

    def run_draft(self, feeds: Sequence[Feed], query: DraftQuery, question: Any, decide: Decide) -> Any:
        """See `DraftingRunner`; it takes the share of the minimum time that the target's weights have which
        it reads."""
        assert self.draft_shape is not None
        due_s = time.perf_counter() + self._least_pass_s * self.draft_shape.share_read
        answer = self._drafting_runner.run_draft(feeds, query, question, decide)
        _sleep_until(due_s)
        return answer

    def end_step(self) -> None:
        """See `device.Runner`."""
        self._runner.end_step()

    def check(self) -> None:
        """See `device.Runner`."""
        self._runner.check()

    def recover(self, is_wanted: Callable[[], bool]) -> None:
        """See `device.Runner`."""
        self._runner.recover(is_wanted)

    def close(self) -> None:
        """See `device.Runner`."""
        self._runner.close()


def _sleep_until(due_s: float) -> None:
    time.sleep(max(0.0, due_s - time.perf_counter()))
