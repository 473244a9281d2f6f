"""What a target proposes after its own verdicts with its heads (`specwire.engine.heads`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specwire.engine.heads.model import Heads
from specwire.rule.transfer import to_device
from verify_service.grown import Node, StatesDrafts


class HeadsDrafts(StatesDrafts):
    """See `StatesDrafts`.

    Args:
        heads: of the target.
        may_be_tree: whether the target verifies trees.
    """

    def __init__(self, heads: Heads, *, may_be_tree: bool) -> None:
        super().__init__(heads, may_be_tree=may_be_tree)
        self._heads = heads

    def split(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `GrownDrafts`; they lie side by side."""
        return logits[:, : self._heads.vocab_size], logits[:, self._heads.vocab_size :]

    def advanced(self, nodes: Sequence[Node], states: Tensor) -> Tensor:
        """See `GrownDrafts`."""
        columns = np.array([(node.parent_row, node.token_id, node.depth) for node in nodes], np.int64).T
        parents, token_ids = (to_device(column.copy(), states.device) for column in columns[:2])
        before = states[parents]
        depths, starts = np.unique(columns[2], return_index=True)
        ends = [*starts[1:].tolist(), len(nodes)]
        parts = [
            self._heads.advance(before[start:end], token_ids[start:end], depth)
            for depth, start, end in zip(depths.tolist(), starts.tolist(), ends, strict=True)
        ]
        return torch.cat(parts).to(states.dtype)
