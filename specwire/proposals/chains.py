"""Several chains of draft tokens that were drawn independently of each other, as one proposal. Pure.

Chains that begin with the same tokens share nodes, so that the target runs these once. How often a node was
drawn counts for the rule, and in which order: `Proposal.leaves` names the last node of each chain.

    chains  the cat     token_ids  the  cat  dog  a  cat     supports  after the prefix, the, (cat), (dog), a
            the dog     parents     -1    0    0 -1    3     leaves    1 2 4 1
            a   cat
            the cat
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from specwire.core import Proposal
from specwire.proposals import tree
from specwire.support import NO_SUPPORT, Support


def merged(
    chains: Sequence[Sequence[int]],
    supports: Sequence[Sequence[Support]],
    base_len: int,
    *,
    source: str = "",
    support_len: int = 0,
) -> Proposal:
    """The proposal that has these chains.

    Args:
        chains: [num_chains][length] token ids.
        supports: [num_chains][length] what each token was drawn from, the same after the same tokens.
        base_len, source, support_len: of the proposal.

    Raises:
        InvalidRequestError: it would have over 64 nodes.
    """
    nodes: dict[tuple[int, int], int] = {}
    token_ids, parents, leaves = list[int](), list[int](), list[int]()
    for own in chains:
        node = -1
        for token_id in own:
            parent, node = node, nodes.setdefault((node, token_id), len(token_ids))
            if node == len(token_ids):
                token_ids.append(token_id)
                parents.append(parent)
        leaves.append(node)
    parents = tree.checked_parents(parents, len(token_ids))
    found = Proposal(base_len, token_ids, (), source, parents, support_len, leaves if token_ids else ())
    after: dict[int, Support] = {}
    for leaf, drawn_from in zip(leaves, supports, strict=True):
        for node, support in zip((-1, *tree.path_to(tree.parents_of(found), leaf)), drawn_from, strict=False):
            after.setdefault(node, support)
    found.supports = [after.get(row - 1, NO_SUPPORT) for row in range(len(token_ids))]
    return found


def first(proposal: Proposal, num_chains: int) -> Proposal:
    """The first of its chains; which ones these are must not depend on their tokens."""
    if len(proposal.leaves) <= num_chains:
        return proposal
    token_ids, supports = split(proposal)
    return merged(
        token_ids[:num_chains],
        supports[:num_chains],
        proposal.base_len,
        source=proposal.source,
        support_len=proposal.support_len,
    )


def paths(proposal: Proposal) -> list[list[int]]:
    """[num_chains][length] the nodes of each chain."""
    parents = tree.parents_of(proposal)
    return [tree.path_to(parents, leaf) for leaf in proposal.leaves]


def laid_out(proposal: Proposal) -> tuple[Sequence[int], Sequence[Support]]:
    """Its tokens, each with what it was drawn from: several chains one after another, as they are sent."""
    if not proposal.leaves:
        return proposal.token_ids, proposal.supports
    token_ids, supports = split(proposal)
    return [*chain.from_iterable(token_ids)], [*chain.from_iterable(supports)]


def split(proposal: Proposal) -> tuple[list[list[int]], list[list[Support]]]:
    """The tokens of each chain, and what they were drawn from: what `merged` makes the proposal of."""
    found = paths(proposal)
    token_ids = [[proposal.token_ids[node] for node in path] for path in found]
    supports = [[proposal.supports[node + 1] for node in (-1, *path[:-1])] for path in found]
    return token_ids, supports
