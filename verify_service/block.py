"""What a target proposes by itself with a block drafter (`specwire.engine.model.block`).

A block is drafted in one pass, with a mask in place of each draft token. So candidates at a depth are the
same after all nodes of the depth before, and trees cost nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from specwire.config.services import VerifyConfig
from specwire.core import Verdict
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from verify_service.grown import Growing, Node
from verify_service.own import Drafting
from verify_service.paged import PagedDrafts

if TYPE_CHECKING:  # it loads transformers
    from specwire.engine.model.block import BlockRunner


class BlockDrafts(PagedDrafts):
    """With a block drafter.

    Args:
        runner: of the target.
        may_be_tree: whether the target verifies trees.
    """

    def __init__(self, runner: BlockRunner, *, may_be_tree: bool) -> None:
        super().__init__(may_be_tree=may_be_tree)
        self._runner = runner
        self._states: Tensor  # of the step's blocks, [num_sequences, num_drafts, state_size]
        self._places: dict[Growing, int] = {}

    @classmethod
    def load(cls, config: VerifyConfig, service: ModelService) -> Self:
        """Of the directory that `--dflash` names."""
        runner: Any = service.runner
        return cls(runner.drafting, may_be_tree=service.info.trees)

    def begin(
        self, sequence: TokenSequence, drafting: Drafting, row: int, verdict: Verdict
    ) -> Growing | None:
        """See `GrownDrafts`; no path is longer than a block."""
        most, wanted = self._runner.num_drafts, drafting.wanted
        if wanted.max_depth:
            drafting.wanted = replace(wanted, max_depth=min(wanted.max_depth, most))
        else:
            drafting.wanted = replace(wanted, num_draft_tokens=min(wanted.num_draft_tokens, most))
        return super().begin(sequence, drafting, row, verdict)

    def grow(self, growing: list[Growing]) -> None:
        """See `GrownDrafts`; nothing near the end of the context."""
        longest = self._runner.context_len
        room = self._runner.num_drafts
        super().grow([each for each in growing if longest is None or len(each.committed) + room <= longest])

    def logits_after(self, nodes: Sequence[Node]) -> Tensor:
        """See `GrownDrafts`: all blocks in one pass, before the first candidates."""
        if nodes[0].depth == 0:
            caches = [node.of.sequence.cache for node in nodes]
            self._states = self._runner.draft(caches, [node.token_id for node in nodes])
            self._places = {of: place for place, (of, _) in enumerate(nodes)}
        found = [self._states[self._places[node.of], node.depth] for node in nodes]
        return self._runner.logits(torch.stack(found))
