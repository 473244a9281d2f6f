"""What a target proposes by itself with EAGLE-3 (`specwire.engine.model.eagle3`).

As `mtp`, in trees too: nodes are appended to the pages of the sequence in the order in which they are
expanded, and attend to the nodes of their path. Where tokens are not matched they are drawn from its own
distribution, whose tokens are some of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from specwire.core import MAX_SUPPORT
from specwire.engine.batch import Feed
from specwire.proposals.tree import TokenTree
from verify_service.grown import Growing, Node
from verify_service.paged import PagedDrafts


class Eagle3Drafts(PagedDrafts):
    """See `GrownDrafts`."""

    draws = True

    def __init__(self, runner: Any, *, may_be_tree: bool) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self.support_len = min(runner.draft_shape.vocab_size, MAX_SUPPORT)
        self._trees: dict[Growing, TokenTree] = {}

    def feeds(self, nodes: Sequence[Node]) -> list[Feed]:
        """See `GrownDrafts`: the last token of each sequence, then nodes."""
        if nodes[0].node < 0:
            self._trees = {}
        by_sequence = groupby(nodes, key=attrgetter("of"))
        return [self._feed(of, [node.node for node in own]) for of, own in by_sequence]

    def _feed(self, growing: Growing, nodes: list[int]) -> Feed:
        """The next tokens of a sequence: its last one, or nodes."""
        cache, growth = growing.sequence.cache, growing.growth
        if nodes == [-1]:
            return Feed(cache, growing.committed[-1:])
        if growing.num_ranked > 1:
            before = self._trees.get(growing) or TokenTree(len(growing.committed), ())
            self._trees[growing] = growth.extended(before, nodes)
        return Feed(cache, [growth.token_ids[node] for node in nodes], 1, self._trees.get(growing))
