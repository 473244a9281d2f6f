"""Token trees: who sees whom, and which path the rule keeps."""

from __future__ import annotations

import numpy as np
import pytest

from specwire.core import Outcome, Proposal, SamplingParams, Verdict
from specwire.errors import InternalError, InvalidRequestError
from specwire.proposals import tree
from specwire.proposals.tree import TokenTree
from specwire.rule.acceptance import accept

#   0 ── 2 ── 4        two children of the prefix, and so on
#     └─ 3
#   1 ── 5
TOKENS = [7, 8, 1, 2, 3, 1]
PARENTS = [-1, -1, 0, 0, 2, 1]


def test_a_node_sees_itself_and_its_ancestors() -> None:
    assert tree.depths(PARENTS) == [0, 0, 1, 1, 2, 1]
    seen = [[j for j in range(6) if int(word) >> j & 1] for word in tree.ancestors(PARENTS)]
    assert seen == [[0], [1], [0, 2], [0, 3], [0, 2, 4], [1, 5]]
    assert [tree.path_to(PARENTS, node) for node in (-1, 4, 5)] == [[], [0, 2, 4], [1, 5]]


def test_the_last_of_64_nodes_fills_the_word() -> None:
    words = tree.ancestors(range(-1, 63))
    assert words.dtype == np.int64
    assert words[63] == -1


def test_a_sequence_may_end_in_a_tree() -> None:
    whole = TokenTree(3, tuple(PARENTS[:4])).extended(PARENTS[4:])
    assert (whole, whole.end) == (TokenTree(3, tuple(PARENTS)), 9)
    assert whole.positions(0, 9).tolist() == [0, 1, 2, 3, 3, 4, 4, 5, 4]
    for first in range(10):
        for last in range(first, 10):
            assert whole.positions(first, last).tolist() == whole.positions(0, 9)[first:last].tolist()
            assert whole.words(first, last).tolist() == [0, 0, 0, *tree.ancestors(PARENTS)][first:last]


@pytest.mark.parametrize(
    ("parents", "num_tokens", "problem"),
    [
        ([-1, 0], 3, "must be none or 3"),
        ([-1, 1], 2, r"parent_indices\[1\]"),
        ([0], 1, r"parent_indices\[0\]"),
        ([-2], 1, r"parent_indices\[0\]"),
        ([-1] * 65, 65, "over 64 nodes"),
    ],
    ids=["too few", "its own parent", "no root", "below the prefix", "too many"],
)
def test_what_is_no_tree_is_refused(parents: list[int], num_tokens: int, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        tree.checked_parents(parents, num_tokens)


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        ([7, 1, 0, 3, 0, 9, 0], Outcome([0, 2, 4], 9)),
        ([7, 2, 0, 0, 5, 0, 0], Outcome([0, 3], 5)),
        ([8, 0, 6, 0, 0, 0, 0], Outcome([1], 6)),
        ([4, 1, 1, 3, 3, 3, 3], Outcome([], 4)),
    ],
    ids=["to a leaf", "the second child", "no child of it", "nothing"],
)
def test_the_path_of_the_targets_own_tokens_is_kept(target: list[int], outcome: Outcome) -> None:
    found = accept(Proposal(3, TOKENS, parents=PARENTS), Verdict(3, target), SamplingParams(temperature=0), 1)
    assert found == outcome
    following = [*(TOKENS[node] for node in outcome.path), outcome.next_token]
    assert tree.follow(TOKENS, PARENTS, following) == list(outcome.path)


def test_a_tree_is_never_judged_by_probabilities() -> None:
    with pytest.raises(InternalError, match="a tree where tokens are not matched"):
        accept(Proposal(0, [1], parents=[-1]), Verdict(0, [1, 2]), SamplingParams(), seed=1)
