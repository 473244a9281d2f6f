"""What a target proposes by itself with EAGLE-3 (`specwire.engine.model.eagle3`).

As `mtp`, in trees too: nodes are appended to the pages of the sequence in the order in which they are
expanded, and attend to the nodes of their path. Where tokens are not matched they are drawn from its own
distribution, whose tokens are some of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from specwire.config.services import VerifyConfig
from specwire.core import MAX_SUPPORT
from specwire.engine.batch import Feed
from specwire.engine.boot import ModelService
from specwire.proposals.tree import TokenTree
from specwire.rule.transfer import to_device
from verify_service.grown import Growing, Node
from verify_service.paged import PagedDrafts

if TYPE_CHECKING:  # it loads transformers
    from specwire.engine.model.eagle3 import Eagle3Runner


class Eagle3Drafts(PagedDrafts):
    """With EAGLE-3.

    Args:
        runner: of the target.
        may_be_tree: whether the target verifies trees.
    """

    draws = True

    def __init__(self, runner: Eagle3Runner, *, may_be_tree: bool) -> None:
        super().__init__(may_be_tree=may_be_tree)
        self._runner = runner
        self.support_len = min(runner.draft_vocab_size, MAX_SUPPORT)
        self._states: Tensor  # after all nodes so far, [num_rows, size]
        self._rows: dict[tuple[Growing, int], int] = {}  # of each among them
        self._trees: dict[Growing, TokenTree] = {}

    @classmethod
    def load(cls, config: VerifyConfig, service: ModelService) -> Self:
        """Of the directory that `--eagle3` names."""
        runner: Any = service.runner
        return cls(runner.drafting, may_be_tree=service.info.trees)

    def logits_after(self, nodes: Sequence[Node]) -> Tensor:
        """See `GrownDrafts`. Proposals that begin together have their prefixes in one pass."""
        is_first = nodes[0].node < 0
        feeds = [
            self._feed(of, [node.node for node in own]) for of, own in groupby(nodes, key=attrgetter("of"))
        ]
        before = None
        if not is_first:
            rows = np.array([self._rows[node.of, node.parent] for node in nodes], np.int64)
            before = self._states[to_device(rows, self._states.device)]
        found = self._runner.advance(feeds, before)
        if is_first:
            self._states, self._rows, self._trees = found, {}, {}
        else:
            self._states = torch.cat([self._states, found])
        num_before = len(self._states) - len(found)
        self._rows |= {(of, node): row for row, (of, node) in enumerate(nodes, num_before)}
        return self._runner.logits(found)

    def _feed(self, growing: Growing, nodes: list[int]) -> Feed:
        """The next tokens of a sequence: its last one, or nodes."""
        cache, growth = growing.sequence.cache, growing.growth
        if nodes == [-1]:
            return Feed(cache, growing.committed[-1:])
        if growing.num_ranked > 1:
            before = self._trees.get(growing) or TokenTree(len(growing.committed), ())
            self._trees[growing] = growth.extended(before, nodes)
        return Feed(cache, [growth.token_ids[node] for node in nodes], 1, self._trees.get(growing))
