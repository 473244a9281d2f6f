"""Several chains as one proposal: merged, cut, followed, and sent in one size whatever their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from coordinator.generation import Plan
from coordinator.peers.checks import check_proposal
from specwire.core import Proposal
from specwire.errors import InternalError, InvalidRequestError
from specwire.proposals import chains, tree
from specwire.rpc.wire import proposals
from specwire.support import Support, certain

THE, CAT, DOG, A = 7, 3, 5, 1
CHAINS = [[THE, CAT], [THE, DOG], [A, CAT], [THE, CAT]]
LENGTH = 3


def support_after(tokens: Sequence[int]) -> Support:
    """Another one after other tokens."""
    weights = np.arange(1, 9) ** (1 + sum(tokens) % 5 / 10 + len(tokens))
    return Support(np.arange(8), (weights / weights.sum()).astype(np.float32))


def proposal_of(token_ids: Sequence[Sequence[int]]) -> Proposal:
    supports = [[support_after(own[:i]) for i in range(len(own))] for own in token_ids]
    return chains.merged(token_ids, supports, 9, source="d")


def test_what_is_shared_is_there_once() -> None:
    found = proposal_of(CHAINS)
    assert (found.token_ids, found.parents, found.leaves) == (
        [THE, CAT, DOG, A, CAT],
        [-1, 0, 0, -1, 3],
        [1, 2, 4, 1],
    )
    assert [len(each.token_ids) > 0 for each in found.supports] == [True, True, False, False, True]
    token_ids, supports = chains.split(found)
    assert token_ids == CHAINS
    assert [len(own) for own in supports] == [2] * 4


def test_chains_that_are_all_alike_are_a_chain() -> None:
    found = proposal_of([[THE, CAT]] * 3)
    assert (found.token_ids, found.parents, found.leaves) == ([THE, CAT], [], [1, 1, 1])
    assert chains.split(found)[0] == [[THE, CAT]] * 3


ANY = [[*own] for own in itertools.product(range(2), repeat=LENGTH)]
PAIRS = [[*pair] for pair in itertools.product(ANY, repeat=2)]


@pytest.mark.parametrize("token_ids", [CHAINS, *PAIRS[::5]])
def test_cut_and_followed(token_ids: list[list[int]]) -> None:
    """What is left is that of the chains that have the tokens, each from there on, drawn from the same."""
    whole, length = proposal_of(token_ids), len(token_ids[0])
    for depth in range(length + 1):
        cut = tree.within(whole, length, depth)
        assert chains.split(cut)[0] == ([own[:depth] for own in token_ids] if depth else [])
    for following in {tuple(own[:n]) for own in token_ids for n in range(length + 1)} | {(99,)}:
        left = tree.after(whole, following)
        rest = [own[len(following) :] for own in token_ids if tuple(own[: len(following)]) == following]
        if not rest:
            assert left is None
            continue
        assert left is not None
        assert left.base_len == whole.base_len + len(following)
        assert chains.split(left)[0] == [own for own in rest if own]
        for own, drawn_from in zip(*chains.split(left), strict=True):
            for i, support in enumerate(drawn_from):
                expected = support_after([*following, *own[:i]])
                assert support.token_ids.tolist() == expected.token_ids.tolist()
                assert support.probs.tolist() == expected.probs.tolist()
        assert len(left.supports) == len(left.token_ids)


def test_the_first_chains_are_the_first_drawn() -> None:
    """Also where they coincide: which ones are judged must not depend on their tokens."""
    whole = proposal_of([[THE, CAT], [THE, CAT], [A, CAT], [THE, DOG]])
    for num in (1, 2, 3, 4):
        assert chains.split(chains.first(whole, num))[0] == chains.split(whole)[0][:num]


def test_over_the_wire() -> None:
    """All of it arrives, and the size of a message does not depend on how many tokens coincide."""
    others = [Proposal(4, [1, 2]), proposal_of([[THE, CAT, DOG, A]]), proposal_of(CHAINS)]
    others[1].leaves = ()
    message = proposals.to_proto(others, 16)
    plain, chain, several = proposals.from_proto(message, [4, 9, 9], 100, "d")
    assert (plain.token_ids, chain.token_ids, several.token_ids) == tuple(each.token_ids for each in others)
    assert (several.parents, several.leaves) == (others[2].parents, others[2].leaves)
    assert chains.split(several)[0] == CHAINS
    assert several.support_len == 16
    sizes = {proposals.to_proto([proposal_of(own)], 16).ByteSize() for own in (CHAINS, [[THE, CAT]] * 4)}
    assert len(sizes) == 1


DRAWN_APART = [support_after(()), Support(support_after(()).token_ids, support_after(()).probs[::-1])]
"""Two chains with one token drawn from two distributions are not what the rule judges."""
MANY = [*range(1, 34), *range(33, 66)]
"""Two chains of 33 tokens, in which nothing is shared but one token in different places."""


@pytest.mark.parametrize(
    ("num_chains", "token_ids", "supports", "problem"),
    [
        (3, [1, 2, 1, 2], certain([1, 2, 1, 2]), "does not fit 4 tokens"),
        (0, [1, 2], certain([1, 2]), "does not fit 2 tokens"),
        (65, [1] * 65, certain([1] * 65), "does not fit 65 tokens"),
        (2, MANY, certain(MANY), "over 64 nodes"),
        (2, [THE, CAT], DRAWN_APART, "differ after the same tokens"),
        (2, [1, 2], (), "num_chains=2"),
    ],
    ids=["uneven", "none", "too many", "too many nodes", "drawn apart", "matched tokens"],
)
def test_what_are_no_chains_is_refused(
    num_chains: int, token_ids: list[int], supports: Sequence[Support], problem: str
) -> None:
    message = proposals.to_proto([Proposal(0, token_ids, supports)], 16 if supports else 0)
    message.num_chains.append(num_chains)
    with pytest.raises(InvalidRequestError, match=problem):
        proposals.from_proto(message, [0], 100)


def test_more_chains_than_were_asked_for_are_refused() -> None:
    check_proposal(proposal_of(CHAINS), matches_tokens=False, num_chains=4)
    with pytest.raises(InternalError, match="4 chains, where 3 were asked for"):
        check_proposal(proposal_of(CHAINS), matches_tokens=False, num_chains=3)


def test_a_plan_near_the_end() -> None:
    """Each chain is cut, and there is one where the context has no room for all of them."""
    plan = Plan(4, num_chains=3)
    assert plan.within(10, 12) == plan
    assert plan.within(3, 12) == Plan(3, num_chains=3)
    assert plan.within(10, 11) == Plan(4)
    several = proposal_of([[1, 2, 3], [1, 3, 2]])
    assert Plan(2, num_chains=2).limit(several).leaves == [1, 2]
    assert chains.split(Plan(2).limit(several))[0] == [[1, 2]]
