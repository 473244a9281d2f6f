"""What a target proposes by itself with layers for multi-token prediction (`specwire.engine.model.mtp`).

As `heads`, but that a layer attends: its keys are in the pages of the sequence, which the target's pass has
filled up to the last accepted token. The next token and draft tokens are appended there, and dropped again.
Chains only: a tree of one layer would take attention to the nodes of a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from specwire.engine.batch import Feed
from specwire.rule.transfer import to_device
from verify_service.grown import Node
from verify_service.paged import PagedDrafts, PagedScorer


class Predictor(PagedScorer, Protocol):
    """A target with layers for multi-token prediction: a `MtpRunner`."""

    def advance(self, feeds: Sequence[Feed], depth: int, states: Tensor | None) -> Tensor:
        """See `MtpRunner.advance`."""


class MtpDrafts(PagedDrafts):
    """With layers for multi-token prediction.

    Args:
        runner: of the target.
    """

    def __init__(self, runner: Predictor) -> None:
        super().__init__(runner, may_be_tree=False)
        self._runner = runner

    def advanced(self, nodes: Sequence[Node], states: Tensor) -> Tensor:
        """See `GrownDrafts`. Chains that began together: all nodes have one depth."""
        depth = nodes[0].depth
        feeds = [Feed(node.of.sequence.cache, [node.token_id]) for node in nodes]
        parents = np.array([node.parent_row for node in nodes], np.int64)
        before = states[to_device(parents, states.device)] if depth else None
        return self._runner.advance(feeds, depth, before).to(states.dtype)
