"""Proposals of something that writes into the pages of the target: layers of its own, a drafter on its
states, or the model itself with some of its blocks left out.

cache   ├── accepted ──┤ rejected ┤                     after the pass
cache   ├── accepted ──┤ what is drafted ┤              dropped again, known to no other sequence
cache   ├── accepted ──┤                                the next round begins here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

from specwire.core import MAX_SUPPORT
from specwire.engine.batch import Feed
from specwire.engine.jobs import TokenSequence
from verify_service.grown import Growing, GrownDrafts, Node
from verify_service.threshold import Threshold
from verify_service.verifier import VerifyJob


class PagedDrafts(GrownDrafts):
    def begin(self, job: VerifyJob) -> Growing | None:
        """See `GrownDrafts`. The sequence goes on as the coordinator's next request will have it do."""
        found = super().begin(job)
        if found is None:
            return None
        sequence, base_len = job.sequence, job.committed_len
        sequence.rebase(base_len, found.committed[base_len:])
        # Pages that others read may have kept a path of a tree from moving together.
        return found if sequence.cache.length == len(found.committed) - 1 else None

    def grow(self, growing: list[Growing]) -> None:
        """See `GrownDrafts`; what is written is dropped again."""
        try:
            super().grow(growing)
        finally:
            for each in growing:
                each.sequence.cache.truncate(len(each.committed) - 1)

    def feeds(self, nodes: Sequence[Node]) -> list[Feed]:
        """See `GrownDrafts`: the last token of each sequence, then nodes in the order of their expansion."""
        feeds = []
        for growing, own in groupby(nodes, key=attrgetter("of")):
            some = [*own]
            growing.run([node.node for node in some])
            token_ids = [node.token_id for node in some]
            feeds.append(Feed(growing.sequence.cache, token_ids, 1, growing.fed))
        return feeds


class Eagle3Drafts(PagedDrafts):
    """See `GrownDrafts`. Tokens that are not matched are drawn from the drafter's own distribution."""

    draws = True

    def __init__(self, runner: Any, *, may_be_tree: bool) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self.support_len = min(runner.draft_shape.vocab_size, MAX_SUPPORT)


class BlockDrafts(PagedDrafts):
    """See `GrownDrafts`. A block is drafted in one pass, with a mask in place of each draft token: candidates
    at a depth are the same after all nodes of the depth before, and trees cost nothing more."""

    def begin(self, job: VerifyJob) -> Growing | None:
        """See `GrownDrafts`; no path is longer than a block."""
        most, wanted = self._runner.draft_shape.longest, job.wanted
        name = "max_depth" if wanted.max_depth else "num_draft_tokens"
        job.wanted = replace(wanted, **{name: min(getattr(wanted, name), most)})
        return super().begin(job)

    def grow(self, growing: list[Growing]) -> None:
        """See `GrownDrafts`; nothing near the end of the context."""
        most, room = self._runner.context_len, len(self._runner.draft_shape.masks)
        super().grow([each for each in growing if most is None or len(each.committed) + room <= most])

    def feeds(self, nodes: Sequence[Node]) -> list[Feed]:
        """See `GrownDrafts`: all blocks, before the first candidates."""
        masks = self._runner.draft_shape.masks
        starts = [node for node in nodes if node.node < 0]
        return [Feed(node.of.sequence.cache, [node.token_id, *masks]) for node in starts]


class LayersDrafts(PagedDrafts):
    """See `GrownDrafts`. The model drafts with some of its blocks left out, and attends to the keys that all
    of it has computed. A proposal ends after a token of which it was not sure (`threshold.py`), which the
    next pass runs at next to no cost; where tokens are not matched it follows from committed tokens alone, so
    its length may depend on them."""

    sharpness = 1.0

    def __init__(self, runner: Any, *, may_be_tree: bool) -> None:
        super().__init__(runner, may_be_tree=may_be_tree)
        self._thresholds: WeakKeyDictionary[TokenSequence, Threshold] = WeakKeyDictionary()

    def begin(self, job: VerifyJob) -> Growing | None:
        """See `GrownDrafts`; how the last proposal fared says where the next one ends."""
        before, num_drafted = self._grown.get(job.sequence), len(job.proposal.token_ids)
        found = super().begin(job)
        threshold = self._thresholds.setdefault(job.sequence, Threshold())
        if before is not None and num_drafted and job.committed_len == len(before.committed):
            assert job.outcome is not None
            was_longest = num_drafted == before.growth.max_depth
            threshold.learn(job.outcome.num_accepted, num_drafted, was_longest=was_longest)
        return found

    def open_after(self, growing: Growing) -> list[int]:
        """See `GrownDrafts`: the last token, if the draft was sure enough of it."""
        is_sure = growing.growth.last_share >= self._thresholds[growing.sequence].value
        return super().open_after(growing) if is_sure else []
