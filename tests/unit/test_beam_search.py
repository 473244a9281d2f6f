"""Beam search without a model: its result by enumeration, and how live beams are packed into trees."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from coordinator.beams.followers import together
from coordinator.beams.trees import BeamTree, common_ancestor, packed, proposal_of
from specwire.core import Logprobs, Proposal
from specwire.errors import ServiceUnavailableError
from specwire.rule.beam_search import Beam, BeamRules, BeamSearch, Scored

VOCAB = 3
END = 2
LENGTH = 4


def model(seed: int) -> Mapping[tuple[int, ...], np.ndarray]:
    """Log probabilities after every text of a tiny language."""
    rng = np.random.default_rng(seed)
    texts = [text for n in range(LENGTH) for text in itertools.product(range(VOCAB), repeat=n)]
    return {text: np.log(rng.dirichlet(np.ones(VOCAB))).astype(np.float32) for text in texts}


def row(values: np.ndarray, num_top: int) -> Logprobs:
    best = np.argsort(-values, kind="stable")[:num_top]
    return Logprobs(best, values[best], len(best))


def rules_of(num_beams: int, length_penalty: float = 2.0, **others: Any) -> BeamRules:
    limits: Any = {"max_tokens": LENGTH, "end_ids": frozenset([END])}
    return BeamRules(num_beams=num_beams, length_penalty=length_penalty, **limits, **others)


def searched(rules: BeamRules, seed: int) -> Sequence[Scored]:
    language, search = model(seed), BeamSearch(rules)
    while not search.ended:
        beams = [each.beam for each in search.live]
        search.step({beam: row(language[tuple(beam.tokens())], rules.num_top) for beam in beams})
    return search.finished


def all_texts(seed: int, length_penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """Every text that ends, or has the longest length, with its score; best first."""
    language, found = model(seed), []
    for length in range(1, LENGTH + 1):
        for text in itertools.product(range(VOCAB), repeat=length):
            if END in text[:-1] or (length < LENGTH and text[-1] != END):
                continue
            score = sum(float(language[text[:i]][token]) for i, token in enumerate(text))
            found.append((score / length**length_penalty, text))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_search_with_enough_beams_finds_the_best_texts(length_penalty: float) -> None:
    """Compared with all texts: no live beam is ever dropped, so that the result is exact."""
    num_beams = 16
    for seed in range(5):
        found = searched(rules_of(num_beams, length_penalty, early_stopping="never"), seed)
        expected = all_texts(seed, length_penalty)[:num_beams]
        assert [tuple(each.beam.tokens()) for each in found] == [text for _, text in expected]
        assert np.allclose([each.score for each in found], [score for score, _ in expected], atol=1e-5)


def test_few_beams_may_miss_them() -> None:
    """The negative control: with two beams the comparison above fails for some language."""
    found = [tuple(searched(rules_of(2), seed)[0].beam.tokens()) for seed in range(20)]
    assert found != [all_texts(seed, 2.0)[0][1] for seed in range(20)]


def grown(num_beams: int, depth: int, seed: int) -> list[Beam]:
    """Distinct beams of one length, which share what they have in common."""
    rng, beams = random.Random(seed), [Beam()]
    for _ in range(depth):
        children = [Beam(beam, token_id) for beam in beams for token_id in range(4)]
        beams = rng.sample(children, min(num_beams, len(children)))
    return beams


@pytest.mark.parametrize("most", [0, 5, 16, 64])
def test_beams_are_packed_into_trees_of_limited_size(most: int) -> None:
    """Each beam is in one tree, as its prefix or a node; parents come before children."""
    for seed in range(20):
        beams = grown(6, 12, seed)
        trees = packed(beams, most)
        assert sorted((beam for tree in trees for beam in tree.beams), key=id) == sorted(beams, key=id)
        for tree in trees:
            assert len(tree.nodes) <= most
            proposal = proposal_of(tree.nodes, tree.prefix.length)
            for beam in tree.beams:
                below = beam.tokens(tree.prefix.length)
                assert [*tree.prefix.tokens(), *below] == beam.tokens()
                assert follow(proposal, below) is not None
            assert all(proposal.parent(node) < node for node in range(len(tree.nodes)))
        assert len(trees) == 1 or most < 64 or len(trees) < len(beams)


def follow(proposal: Proposal, token_ids: Sequence[int]) -> int | None:
    """The node that these tokens lead to."""
    node = -1
    for token_id in token_ids:
        found = [child for child in proposal.children(node) if proposal.token_ids[child] == token_id]
        if not found:
            return None
        [node] = found
    return node


def test_draft_tokens_follow_their_beams_within_the_room() -> None:
    """Of a chain and of a tree; a token that is proposed twice is one node."""
    root = Beam()
    one, other = (Beam(root, token_id) for token_id in (7, 8))
    tree = BeamTree([one, other])
    tree.add(one, Proposal(1, [1, 2], source="draft"), 8)
    tree.add(other, Proposal(1, [1, 3, 4], source="draft", parents=[-1, -1, 1]), 6)
    assert proposal_of(tree.nodes, 0).token_ids == [7, 8, 1, 2, 1, 3]
    assert proposal_of(tree.nodes, 0).parents == [-1, -1, 0, 2, 1, 1]
    drafted = proposal_of(tree.nodes[tree.num_live_nodes :], 0)
    assert (drafted.parents, drafted.source) == ([-1, 0, -1, -1], "num_beams")
    tree.add(one, Proposal(1, [1, 5], source="draft"), 8)
    assert len(tree.nodes) == 7
    assert tree.drafted[one, 1] is tree.nodes[2]


def test_the_common_ancestor_is_the_longest_text_that_both_begin_with() -> None:
    """Of beams of any two lengths."""
    root = Beam()
    stem = Beam(Beam(root, 1), 2)
    left, right = Beam(Beam(stem, 3), 4), Beam(stem, 5)
    assert common_ancestor(left, right) is stem
    assert common_ancestor(stem, left) is stem
    assert common_ancestor(right, right) is right


def test_a_failure_ends_all_calls_of_a_round() -> None:
    """None waits for ever."""
    cancelled = []

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ServiceUnavailableError("gone")

    async def both() -> None:
        try:
            await together([waiting(), failing()])
        finally:
            await asyncio.sleep(0)

    with pytest.raises(ServiceUnavailableError):
        asyncio.run(both())
    assert cancelled == [True]


def test_beams_that_parted_long_ago_are_packed_quickly() -> None:
    root = Beam()
    beams = [root] * 16
    for _ in range(4000):
        beams = [Beam(beam, place) for place, beam in enumerate(beams)]
    started_s = time.perf_counter()
    trees = packed(beams, 64)
    assert time.perf_counter() - started_s < 0.05
    assert [tree.prefix for tree in trees] == beams
    assert common_ancestor(*beams[:2]) is root
