"""Proposals of something that writes into the pages of the target.

cache   ├── accepted ──┤ rejected ┤                     after the pass
cache   ├── accepted ──┤ what is drafted ┤
cache   ├── accepted ──┤                                the next round begins here
"""

from __future__ import annotations

from collections.abc import Sequence

from specwire.core import Verdict
from specwire.engine.batch import Feed
from specwire.engine.jobs import TokenSequence
from verify_service.grown import Growing, GrownDrafts, Node
from verify_service.own import Drafting


class PagedDrafts(GrownDrafts):
    """See `GrownDrafts`."""

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

    def grow(self, growing: list[Growing]) -> None:
        """See `GrownDrafts`; what is written is dropped again."""
        try:
            super().grow(growing)
        finally:
            for each in growing:
                each.sequence.cache.truncate(len(each.committed) - 1)

    def feeds(self, nodes: Sequence[Node]) -> list[Feed]:
        """See `GrownDrafts`: a token of each sequence, of chains that began together."""
        return [Feed(node.of.sequence.cache, [node.token_id]) for node in nodes]
