"""What a target proposes by itself with a block drafter (`specwire.engine.model.block`).

A block is drafted in one pass, with a mask in place of each draft token. So candidates at a depth are the
same after all nodes of the depth before, and trees cost nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specwire.core import Verdict
from specwire.engine.batch import Feed
from specwire.engine.jobs import TokenSequence
from verify_service.grown import Growing, Node
from verify_service.own import Drafting
from verify_service.paged import PagedDrafts


class BlockDrafts(PagedDrafts):
    """See `GrownDrafts`."""

    def begin(
        self, sequence: TokenSequence, drafting: Drafting, row: int, verdict: Verdict
    ) -> Growing | None:
        """See `GrownDrafts`; no path is longer than a block."""
        most, wanted = self._runner.draft_shape.longest, drafting.wanted
        if wanted.max_depth:
            drafting.wanted = replace(wanted, max_depth=min(wanted.max_depth, most))
        else:
            drafting.wanted = replace(wanted, num_draft_tokens=min(wanted.num_draft_tokens, most))
        return super().begin(sequence, drafting, row, verdict)

    def grow(self, growing: list[Growing]) -> None:
        """See `GrownDrafts`; nothing near the end of the context."""
        most, room = self._runner.context_len, len(self._runner.draft_shape.masks)
        super().grow([each for each in growing if most is None or len(each.committed) + room <= most])

    def feeds(self, nodes: Sequence[Node]) -> list[Feed]:
        """See `GrownDrafts`: all blocks, before the first candidates."""
        masks = self._runner.draft_shape.masks
        starts = [node for node in nodes if node.node < 0]
        return [Feed(node.of.sequence.cache, [node.token_id, *masks]) for node in starts]
