"""Several chains of draft tokens, drawn independently of each other. Knows no grpc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafter import DraftJob
from specwire.engine.drawn import Drawn
from specwire.proposals import chains
from specwire.proposals.tree import TokenTree
from specwire.support import Support


@dataclass(eq=False)
class ChainsJob(DraftJob):
    """Commit tokens, then draw `num_chains` chains of `num_draft_tokens` each, a forward pass for each depth.

    A pass runs one token of each chain, whether or not others have the same: its time must not depend on
    tokens that are not judged. Chains with the same tokens so far are drawn from one row, that of the first
    of them, since they are to be draws from one distribution to the last bit; it is its nodes that they see.

    Attributes:
        num_chains: at least 1.
        drawn: [num_chains] the tokens of each.
        drawn_from: [num_chains] what each of these was drawn from.
    """

    num_chains: int = 1
    drawn: list[list[int]] = field(init=False, default_factory=list)
    drawn_from: list[list[Support]] = field(init=False, default_factory=list)

    def start(self) -> None:
        super().start()
        self.drawn = [[] for _ in range(self.num_chains)]
        self.drawn_from = [[] for _ in range(self.num_chains)]
        self.draws = [0] * self.num_chains

    @property
    def _depth(self) -> int:
        return len(self.drawn[0])

    def positions(self) -> Sequence[int]:
        """After the last token of each chain; before the first one, of all together."""
        return [self.committed_len + self._depth] * self.num_rows

    def histories(self) -> list[Sequence[int]]:
        """Each chain's own tokens."""
        return [[*self.before, *own] for own in self.drawn[: self.num_rows]]

    def add(self, drawn: Drawn, row: int) -> None:
        """A token of each chain; unless they are the last, the next pass runs them."""
        token_ids = [drawn.of_chains[row + first, chain] for chain, first in enumerate(self.draws)]
        if self.fails(min(token_ids), self._depth):
            return
        self._append_nodes(token_ids)
        for own, own_from, token_id, first in zip(
            self.drawn, self.drawn_from, token_ids, self.draws, strict=True
        ):
            support = drawn.supports[row + first]
            assert support is not None  # tokens are sampled
            own.append(max(token_id, 0))
            own_from.append(support)
        self.draws = [self.drawn.index(own) for own in self.drawn]
        self.num_rows = self.num_chains
        if self._depth == self.num_draft_tokens:
            self.result = chains.merged(self.drawn, self.drawn_from, self.committed_len)

    def _append_nodes(self, token_ids: Sequence[int]) -> None:
        """To the sequence; a chain goes on from the first one that has its tokens so far."""
        if self._depth + 1 == self.num_draft_tokens:
            return
        sequence = self.sequence
        before = sequence.tree or TokenTree(self.own_len, ())
        last = len(before.parents) - self.num_chains
        sequence.tokens += [max(token_id, 0) for token_id in token_ids]
        sequence.tree = before.extended(last + first if self._depth else -1 for first in self.draws)
