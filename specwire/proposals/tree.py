"""Token trees: several continuations of one prefix, verified in one pass. Pure.

A tree of n nodes is `token_ids` [n] and `parents` [n]: the index of each node's parent, -1 for a child of the
prefix; parents come before their children. No parents at all is a chain, in which each node follows the one
before it.

    prefix ── 0 the ── 2 cat         token_ids  the  a  cat  dog
           └─ 1 a   ── 3 dog         parents     -1 -1    0    1

Source: Miao et al. 2023 (arXiv 2305.09781), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specwire import core
from specwire.core import MAX_TREE_NODES, Proposal
from specwire.errors import InvalidRequestError
from specwire.support import NO_SUPPORT, IntArray


def checked_parents(parents: Sequence[int], num_tokens: int) -> list[int]:
    """The parents of this many tokens; none for those of a chain.

    Raises:
        InvalidRequestError: their number is neither 0 nor that of the tokens, there are over 64, or one does
            not come before its child.
    """
    if parents and len(parents) != num_tokens:
        raise InvalidRequestError("parent_indices", len(parents), f"must be none or {num_tokens}")
    if len(parents) > MAX_TREE_NODES:
        raise InvalidRequestError("parent_indices", len(parents), f"over {MAX_TREE_NODES} nodes")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise InvalidRequestError(f"parent_indices[{node}]", parent, f"must lie in [-1, {node})")
    return [] if all(parent == node - 1 for node, parent in enumerate(parents)) else list(parents)


def depths(parents: Sequence[int]) -> list[int]:
    """[n] nodes between each node and the prefix; 0 for children of the prefix."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def ancestors(parents: Sequence[int]) -> IntArray:
    """int64 [n]: bit j of word i says that node i sees node j, which is itself or one of its ancestors."""
    words = np.zeros(len(parents), dtype=np.uint64)
    for node, parent in enumerate(parents):
        seen = words[parent] if parent >= 0 else np.uint64(0)
        words[node] = seen | np.uint64(1 << node)
    return words.view(np.int64)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the prefix to a node, itself included; none for -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def child(token_ids: Sequence[int], parents: Sequence[int], node: int, token_id: int) -> int | None:
    """The first child of a node, or of the prefix (-1), that has this token; None if there is none."""
    for i in range(node + 1, len(parents)):
        if parents[i] == node and token_ids[i] == token_id:
            return i
    return None


def follow(token_ids: Sequence[int], parents: Sequence[int], following: Sequence[int]) -> list[int]:
    """The nodes along the tokens that follow the prefix, as far as the tree has them."""
    path: list[int] = []
    for token_id in following:
        node = child(token_ids, parents, path[-1] if path else -1, token_id)
        if node is None:
            break
        path.append(node)
    return path


def within(proposal: Proposal, num_tokens: int, max_depth: int) -> Proposal:
    """The first tokens of a proposal that are on no longer path.

    Args:
        num_tokens: most tokens; of several chains, of each.
        max_depth: longest path, in tokens.
    """
    if not (proposal.parents or proposal.leaves):
        return proposal.first(min(num_tokens, max_depth))
    if proposal.leaves:
        max_depth = min(num_tokens, max_depth)
    parents = parents_of(proposal)
    depth_of, found = depths(parents), proposal
    if max(depth_of, default=0) >= max_depth:
        kept = [node for node, depth in enumerate(depth_of) if depth < max_depth]
        leaves = [path_to(parents, leaf)[max_depth - 1] for leaf in proposal.leaves] if max_depth else ()
        found = _selected(proposal, kept, proposal.base_len, -1, leaves)
    return found if proposal.leaves else found.first(num_tokens)


def num_in_common(proposal: Proposal, following: Sequence[int]) -> int:
    """How many of the tokens that follow a proposal's prefix it has on a path."""
    if not proposal.parents:
        return core.num_in_common(proposal.token_ids, following)
    return len(follow(proposal.token_ids, proposal.parents, following))


def after(proposal: Proposal, following: Sequence[int]) -> Proposal | None:
    """What is left of a proposal when these tokens follow its prefix; None if it does not have them."""
    base_len = proposal.base_len + len(following)
    if not (proposal.parents or proposal.leaves):
        agrees = list(proposal.token_ids[: len(following)]) == list(following)
        rest = proposal.token_ids[len(following) :], proposal.supports[len(following) :]
        return Proposal(base_len, *rest, proposal.source) if agrees else None
    parents = parents_of(proposal)
    path = follow(proposal.token_ids, parents, following)
    if len(path) < len(following):
        return None
    if not path:
        return proposal
    words = ancestors(parents)
    below = [node for node in range(path[-1] + 1, len(words)) if int(words[node]) >> path[-1] & 1]
    return _selected(proposal, below, base_len, path[-1], proposal.leaves)


def parents_of(proposal: Proposal) -> Sequence[int]:
    """The parents of its tokens, of a chain too."""
    return proposal.parents or range(-1, len(proposal.token_ids) - 1)


def _selected(
    proposal: Proposal, nodes: Sequence[int], base_len: int, root: int, leaves: Sequence[int]
) -> Proposal:
    """These nodes of a tree; those whose parent is not among them follow the prefix.

    Args:
        root: the last node of that prefix; -1 for that of the proposal.
        leaves: of several chains; those that are not among the nodes are left out.
    """
    places = {node: place for place, node in enumerate(nodes)}
    parents = parents_of(proposal)
    ends = [places[leaf] for leaf in leaves if leaf in places]
    supports = [  # what the tokens after each node were drawn from; nothing where chains end now
        NO_SUPPORT if places.get(node) in ends else proposal.supports[node + 1]
        for node in ((root, *nodes[:-1]) if ends else ())
    ]
    return Proposal(
        base_len,
        [proposal.token_ids[node] for node in nodes],
        supports,
        source=proposal.source,
        parents=[places.get(parents[node], -1) for node in nodes],
        leaves=ends,
    )


@dataclass(frozen=True)
class TokenTree:
    """The last tokens of a sequence as a tree: node i is its token `start + i`.

    A node's position is that of a token in its own path, so siblings share one:

        index      0 1 2 3 | 4 5 6 7      start = 4, parents = -1 -1 0 2
        position   0 1 2 3 | 4 4 5 6

    Attributes:
        start: tokens before the tree, which every node follows.
        parents: see `checked_parents`.
    """

    start: int
    parents: tuple[int, ...]

    @property
    def end(self) -> int:
        """Tokens of the sequence up to the last node."""
        return self.start + len(self.parents)

    def extended(self, parents: Iterable[int]) -> TokenTree:
        """The tree with more nodes after those it has; `parents` are the new ones' alone."""
        return TokenTree(self.start, (*self.parents, *parents))

    def positions(self, first: int, last: int) -> IntArray:
        """int64 [last - first], the positions of tokens [first, last) of the sequence."""
        index = np.arange(first, last, dtype=np.int64)
        index[max(0, self.start - first) :] = self.start + self._of(self._depths, first, last)
        return index

    def words(self, first: int, last: int) -> IntArray:
        """int64 [last - first], the nodes that tokens [first, last) see (`ancestors`); 0 before the tree."""
        words = np.zeros(last - first, dtype=np.int64)
        words[max(0, self.start - first) :] = self._of(self._ancestors, first, last)
        return words

    def _of(self, nodes: IntArray, first: int, last: int) -> IntArray:
        """The entries of those nodes that are tokens [first, last) of the sequence."""
        return nodes[max(0, first - self.start) : max(0, last - self.start)]

    @cached_property
    def _depths(self) -> IntArray:
        return np.array(depths(self.parents), dtype=np.int64)

    @cached_property
    def _ancestors(self) -> IntArray:
        return ancestors(self.parents)
