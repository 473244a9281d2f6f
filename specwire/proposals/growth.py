"""A token tree that grows best first: the nodes that the target most likely reaches. Pure.

    worth(node) = probability that the target follows the path to it
                = worth(parent) · probability of its token after the path

Each forward pass of the draft *expands* nodes: its candidates there become their children. The tree that is
proposed is the best `size` of all nodes found; since no child is worth more than its parent, it is
connected. Source: Li et al. 2024 (EAGLE-2, arXiv 2406.16858), sections 4.1 and 4.2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from specwire.core import MAX_TREE_NODES, Proposal
from specwire.proposals import tree
from specwire.proposals.tree import TokenTree

NUM_EXPANDED = 8
"""Most nodes of a tree that a pass expands: 4, 8 and 16 commit equally many tokens, 2 some 5 % less."""
NUM_RANKS = 8
"""Candidates at each position that are counted."""
_EDGES = np.array([0.003, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
_MIDDLES = np.concatenate([[_EDGES[0] / 2], np.sqrt(_EDGES[:-1] * _EDGES[1:]), [(_EDGES[-1] + 1) / 2]])
_EDGE_LIST: list[float] = _EDGES.tolist()
_PRIOR_WEIGHT = 4.0
"""Weight of the draft's own share, in judgements."""
_MEMORY = 0.995
"""Decay of a judgement's weight with each later one of its rank: texts change."""


class Calibration:
    """How likely candidates are the target's tokens, given what the draft's own scores say.

    A draft is surer, or less sure, of its candidates than it should be. So it is counted, in all streams of a
    kind, how often one was right, by its rank and by ranges of the share that the draft gives it.
    """

    def __init__(self) -> None:
        self._judged = np.zeros((NUM_RANKS, len(_MIDDLES)))
        self._right = np.zeros((NUM_RANKS, len(_MIDDLES)))
        self._found = self._estimates()

    def probabilities(self, shares: Sequence[float]) -> list[float]:
        """The probability that the target takes each of a position's candidates.

        Args:
            shares: by rank, best first, what the draft's scores say; at most NUM_RANKS.
        """
        return [self._found[rank][bisect_right(_EDGE_LIST, share)] for rank, share in enumerate(shares)]

    def add(self, shares: Sequence[float], rank: int | None) -> None:
        """The target has decided at a position; `rank` is None where no candidate was its token."""
        ranks, ranges = np.arange(len(shares)), np.searchsorted(_EDGES, shares, side="right")
        self._judged[ranks] *= _MEMORY
        self._right[ranks] *= _MEMORY
        self._judged[ranks, ranges] += 1
        if rank is not None:
            self._right[rank, ranges[rank]] += 1
        self._found = self._estimates()

    def _estimates(self) -> list[list[float]]:
        """Probabilities by rank and range, as lists: they are looked up for every node of every tree."""
        found: list[list[float]] = (
            (self._right + _PRIOR_WEIGHT * _MIDDLES) / (self._judged + _PRIOR_WEIGHT)
        ).tolist()
        return found


class TreeGrowth:
    """Nodes found so far, in the order in which they were found: parents come before their children.

    Attributes:
        max_depth: longest path, in nodes.
        token_ids, parents, depths, worths: by node; -1 is the prefix.
        expanded: the nodes that were expanded, in order, the prefix not among them.
    """

    def __init__(self, size: int, max_depth: int, calibration: Calibration) -> None:
        """Args:
        size: nodes of the tree that is proposed.
        """
        self._size = size
        self.max_depth = max_depth
        self._calibration = calibration
        self._shares: dict[int, tuple[int, Sequence[float]]] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.worths: list[float] = []
        self.expanded: list[int] = []
        self._best: list[int] = []  # so far, and what was found since

    @property
    def num_nodes(self) -> int:
        """Nodes found so far; another thread may be adding more."""
        return len(self.worths)  # the last of the lists that a node is added to

    @property
    def last_share(self) -> float:
        """How likely the candidate that was found last is by the draft's scores alone; 0 before any."""
        if not self.parents:
            return 0.0
        first, shares = self._shares[self.parents[-1]]
        return shares[len(self.parents) - 1 - first]

    def add(self, node: int, token_ids: Sequence[int], shares: Sequence[float]) -> None:
        """The candidates after a node, or after the prefix (-1), which has been expanded.

        Args:
            token_ids: best first.
            shares: how likely they are by the draft's scores alone.
        """
        self._shares[node] = len(self.token_ids), shares
        probabilities = self._calibration.probabilities(shares)
        worth, depth = self.worths[node] if node >= 0 else 1.0, self.depth_after(node)
        self._best += range(len(self.token_ids), len(self.token_ids) + len(token_ids))
        for token_id, probability in zip(token_ids, probabilities, strict=True):
            self.token_ids.append(token_id)
            self.parents.append(node)
            self.depths.append(depth)
            self.worths.append(worth * probability)

    def depth_after(self, node: int) -> int:
        """Of what follows a node, or the prefix (-1)."""
        return self.depths[node] + 1 if node >= 0 else 0

    def learn(self, following: Sequence[int]) -> None:
        """The target went on with these tokens: each is compared with the candidates at its position."""
        node = -1
        for token_id in following:
            if node not in self._shares:
                return
            first, shares = self._shares[node]
            token_ids = self.token_ids[first : first + len(shares)]
            rank = token_ids.index(token_id) if token_id in token_ids else None
            self._calibration.add(shares, rank)
            if rank is None:
                return
            node = first + rank

    def path_to(self, node: int) -> list[int]:
        """The tokens from the prefix to a node, its own included; none for -1."""
        return [self.token_ids[each] for each in tree.path_to(self.parents, node)]

    def best(self) -> list[int]:
        """The best `size` nodes, best first: a child comes after its parent."""
        self._best.sort(key=self.worths.__getitem__, reverse=True)  # stable
        del self._best[self._size :]  # and never again among the best
        return list(self._best)

    def expand(self, width: int) -> list[int]:
        """The best nodes of the tree that are not expanded, which counts them as expanded.

        Args:
            width: most of them.
        """
        known = set(self.expanded)
        room = min(width, MAX_TREE_NODES - len(known))
        open_nodes = [
            node for node in self.best() if node not in known and self.depths[node] + 1 < self.max_depth
        ]
        self.expanded += open_nodes[:room]
        return open_nodes[:room]

    def extended(self, before: TokenTree, nodes: Sequence[int]) -> TokenTree:
        """A tree with the nodes that are run next, of those expanded last: nodes lie in the order in which
        they are run."""
        places = {node: place for place, node in enumerate(self.expanded)}
        return before.extended([places.get(self.parents[node], -1) for node in nodes])

    def proposal(self, base_len: int) -> Proposal:
        """The best nodes as a tree."""
        nodes = self.best()
        places = {node: place for place, node in enumerate(nodes)}
        return Proposal(
            base_len,
            [self.token_ids[node] for node in nodes],
            parents=[places.get(self.parents[node], -1) for node in nodes],
        )
