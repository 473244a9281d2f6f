"""Proposals of something that has keys in the pages of the target.

cache   ├── accepted ──┤ rejected ┤                     after the pass
cache   ├── accepted ──┤ what is drafted ┤
cache   ├── accepted ──┤                                the next round begins here
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specwire.core import Verdict
from specwire.engine.jobs import TokenSequence
from specwire.errors import ResourceExhaustedError
from verify_service.grown import Growing, Scorer, StatesDrafts
from verify_service.own import Drafting

log = logging.getLogger(__name__)


class PagedScorer(Scorer, Protocol):
    """A target that keeps in its pages what proposals are made of."""

    @property
    def state_size(self) -> int:
        """Width of a state."""


class PagedDrafts(StatesDrafts):
    """See `StatesDrafts`.

    Args:
        runner: of the target.
        may_be_tree: whether proposals may be trees.
    """

    def __init__(self, runner: PagedScorer, *, may_be_tree: bool) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self._state_size = runner.state_size

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `GrownDrafts`; the states are in the pages, and these are never read."""
        return logits, logits.new_empty(len(logits), self._state_size)

    def begin(
        self, sequence: TokenSequence, drafting: Drafting, row: int, verdict: Verdict
    ) -> Growing | None:
        """See `GrownDrafts`. The sequence goes on as the coordinator's next request will have it do."""
        found = super().begin(sequence, drafting, row, verdict)
        if found is None:
            return None
        base_len = drafting.judged.base_len
        sequence.rebase(base_len, found.committed[base_len:])
        # Pages that others read may have kept a path of a tree from moving together.
        return found if sequence.cache.length == len(found.committed) - 1 else None

    def grow(self, growing: list[Growing], states: Tensor | None) -> None:
        """See `GrownDrafts`; where the cache is full, with the tokens that there was room for."""
        try:
            super().grow(self.fill(growing), states)
        except ResourceExhaustedError as error:
            log.debug("no room to draft in: %s", error)
        finally:
            for each in growing:
                each.sequence.cache.truncate(len(each.committed) - 1)

    def fill(self, growing: Sequence[Growing]) -> list[Growing]:
        """What precedes the growth of proposals; returns those for which there is room."""
        return [*growing]
