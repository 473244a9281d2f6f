"""What a target proposes by itself with a block drafter (`specwire.engine.model.block`).

A block is drafted in one pass, with a mask in place of each draft token. So candidates at a depth are the
same after all nodes of the depth before, and trees cost nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from specwire.core import Verdict
from specwire.engine.cache.kv_cache import SequenceCache
from specwire.engine.jobs import TokenSequence
from verify_service.grown import Growing, Node
from verify_service.own import Drafting
from verify_service.paged import PagedDrafts, PagedScorer


class BlockDrafter(PagedScorer, Protocol):
    """A target with a block drafter: a `BlockRunner`."""

    @property
    def block_size(self) -> int:
        """The last token and draft tokens of a block."""

    @property
    def context_len(self) -> int | None:
        """Most tokens of a sequence; None for no limit."""

    def draft(self, caches: Sequence[SequenceCache], token_ids: Sequence[int]) -> Tensor:
        """See `BlockRunner.draft`."""


class BlockDrafts(PagedDrafts):
    """With a block drafter.

    Args:
        runner: of the target.
        may_be_tree: whether the target verifies trees.
    """

    def __init__(self, runner: BlockDrafter, *, may_be_tree: bool) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self._runner = runner
        self._states: Tensor  # of the step's blocks, [num_sequences, block_size, state_size]
        self._places: dict[int, int] = {}

    def begin(
        self, sequence: TokenSequence, drafting: Drafting, row: int, verdict: Verdict
    ) -> Growing | None:
        """See `GrownDrafts`; no path is longer than a block."""
        most, wanted = self._runner.block_size - 1, drafting.wanted
        if wanted.max_depth:
            drafting.wanted = replace(wanted, max_depth=min(wanted.max_depth, most))
        else:
            drafting.wanted = replace(wanted, num_draft_tokens=min(wanted.num_draft_tokens, most))
        return super().begin(sequence, drafting, row, verdict)

    def fill(self, growing: Sequence[Growing]) -> list[Growing]:
        """See `PagedDrafts`: all blocks in one pass; none near the end of the context."""
        longest = self._runner.context_len
        room = self._runner.block_size - 1
        fitting = [each for each in growing if longest is None or len(each.committed) + room <= longest]
        if fitting:
            caches = [each.sequence.cache for each in fitting]
            self._states = self._runner.draft(caches, [each.committed[-1] for each in fitting])
        self._places = {id(each): place for place, each in enumerate(fitting)}
        return fitting

    def advanced(self, nodes: Sequence[Node], states: Tensor) -> Tensor:
        """See `GrownDrafts`."""
        found = [self._states[self._places[id(node.of)], node.depth + 1] for node in nodes]
        return torch.stack(found).to(states.dtype)
