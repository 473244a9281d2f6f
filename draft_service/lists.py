"""Several chains of draft tokens, each drawn with lists of Gumbel noise of its own. Knows no grpc.

The target draws from all lists together (`specwire.rule.rows.coupled_noise`), so its token is the one that
wins the race of some list. At every node the lists are shared out among the chains that are there:

    lists 0 1 2 3    after the prefix    chain 0: 0    chain 1: 1    chain 2: 2    chain 3: 3
                     after "the"         chain 0: 0 2                chain 2: 1 3
                     after "a"                         chain 1: 0 1 2 3

Races over different lists are independent draws. A chain that is alone races over all lists as the target
does: that is the coupling of one list. Were it left with one of its own, lists that no chain follows would
decide about most of the target's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_service.drafter import DraftJob, Drawn
from specwire import chains
from specwire.core import Proposal
from specwire.errors import InternalError
from specwire.rule.rows import Race
from specwire.tree import TokenTree


@dataclass(eq=False)
class ListsJob(DraftJob):
    """Commit tokens, then draw `num_chains` chains of `num_draft_tokens` each, a forward pass for each depth.

    Tokens are matched, so neither time nor size has to be the same for all tokens: chains that coincide are
    run once, and the proposal is a tree. It ends before the first depth where logits are not finite.

    Attributes:
        num_chains: at least 1, at most as many as there are lists.
        drawn: [num_chains] the tokens of each.
    """

    num_chains: int = 1
    drawn: list[list[int]] = field(init=False, default_factory=list)
    _at: Sequence[int] = field(init=False, default=())

    def start(self) -> None:
        super().start()
        self.drawn = [[] for _ in range(self.num_chains)]
        self._at = [0] * self.num_chains

    @property
    def races(self) -> Sequence[Race]:
        """[num_chains] the row that each chain is at, and its share of the lists."""
        return shared_out(self.sequence.encoded.num_lists, self._at)

    @property
    def _depth(self) -> int:
        return len(self.drawn[0])

    def positions(self) -> list[int]:
        """After the last token of every chain."""
        return [self.committed_len + self._depth] * self.num_rows

    def histories(self) -> list[Sequence[int]]:
        """Of the chains at each row, their own tokens."""
        return [[*self.before, *self.drawn[self._at.index(row)]] for row in range(self.num_rows)]

    def add(self, drawn: Drawn, row: int) -> None:
        """A token of each chain; unless they are the last, the next pass runs those that differ."""
        token_ids = drawn.of_chains[row]
        if min(token_ids) < 0:
            self.result = self._proposal()
            return
        for own, token_id in zip(self.drawn, token_ids, strict=True):
            own.append(token_id)
        if self._depth == self.num_draft_tokens:
            self.result = self._proposal()
        else:
            self._append_nodes()

    def _append_nodes(self) -> None:
        """One for each different chain."""
        sequence, at = self.sequence, self._at
        before = sequence.tree or TokenTree(self.own_len, ())
        last = len(before.parents) - self.num_rows if before.parents else -1
        firsts = list(dict.fromkeys(map(self.drawn.index, self.drawn)))
        self._at = [firsts.index(self.drawn.index(own)) for own in self.drawn]
        self.num_rows = len(firsts)
        sequence.tokens += [self.drawn[chain][-1] for chain in firsts]
        sequence.tree = before.extended(last + at[chain] for chain in firsts)

    def _proposal(self) -> Proposal | InternalError:
        if not self._depth:
            return InternalError("the draft's logits are not finite")
        token_ids, parents, _ = chains.joined(self.drawn)
        return Proposal(self.committed_len, token_ids, parents=parents)


def shared_out(num_lists: int, at: Sequence[int]) -> list[Race]:
    """The share of the lists that each chain draws with: of those at a node, all have different ones.

    Args:
        at: [num_chains] the row that each is at.
    """
    places = [at[:chain].count(row) for chain, row in enumerate(at)]
    return [Race(row, range(place, num_lists, at.count(row))) for place, row in zip(places, at, strict=True)]
