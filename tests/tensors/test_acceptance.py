"""The accept rules: exact by algebra, and right at the edges."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specwire.core import Outcome, Proposal, Rule, SamplingParams, Verdict
from specwire.errors import InternalError
from specwire.rule import acceptance
from specwire.rule.acceptance import (
    accept,
    accept_by_block,
    accept_by_match,
    accept_by_rejection,
    acceptance_probability,
    residual,
)
from specwire.rule.random import Purpose, uniforms
from specwire.rule.sampling import judge_support, truncate_support
from specwire.support import Support

ALMOST_ONE = 1 - 2.0**-53


def support(token_ids: npt.ArrayLike, probs: npt.ArrayLike) -> Support:
    return Support(np.array(token_ids, dtype=np.int64), np.array(probs, dtype=np.float32))


def floats(values: npt.ArrayLike) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def random_probs(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """A distribution with many zeros and orders of magnitude between the rest."""
    weights = rng.gamma(0.3, size=vocab_size) * (rng.random(vocab_size) < rng.choice([0.3, 0.7, 1.0]))
    weights[rng.integers(vocab_size)] += 0.1
    return (weights / weights.sum()).astype(np.float32)


def judged(
    draft_probs: np.ndarray, target_probs: np.ndarray, mass: float, max_support: int
) -> tuple[Support, np.ndarray, float, np.ndarray]:
    """Cut and judge with the real functions: the support, target on it, tail mass, tail probabilities."""
    token_ids, probs, lengths = truncate_support(torch.from_numpy(draft_probs)[None], mass, max_support)
    length = int(lengths[0])
    on_support, tail_mass, _ = judge_support(
        torch.from_numpy(target_probs)[None], token_ids[:, :length], torch.zeros(1, dtype=torch.float64)
    )
    draft = Support(token_ids[0, :length].numpy(), probs[0, :length].numpy())
    outside = target_probs.astype(np.float64)
    outside[draft.token_ids] = 0
    return draft, on_support[0].numpy(), float(tail_mass[0]), outside / max(outside.sum(), 1e-300)


def kept_and_recovered(
    draft: Support, target_probs: np.ndarray, tail_mass: float, outside: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Probability that a position emits each token by acceptance, and by recovery."""
    kept, recovered = np.zeros(len(outside)), np.zeros(len(outside))
    probs = draft.probs.astype(np.float64) / draft.probs.sum(dtype=np.float64)
    pairs = zip(probs, target_probs.tolist(), strict=True)
    kept[draft.token_ids] = probs * [acceptance_probability(d, t) for d, t in pairs]
    weights, tail_weight = residual(draft, target_probs, tail_mass)
    total = weights.sum() + tail_weight
    if total > 0:
        recovered[draft.token_ids] = weights / total
        recovered += tail_weight / total * outside
    return kept, (1 - kept.sum()) * recovered


@pytest.mark.parametrize(("mass", "max_support"), [(0.99, 1024), (0.9, 5), (0.5, 3), (1.0, 1)])
def test_emitted_distribution_is_the_target(mass: float, max_support: int) -> None:
    """draft · accept + P(reject) · residual = target, to float32's precision."""
    rng = np.random.default_rng(3)
    for _ in range(100):
        vocab_size = int(rng.integers(2, 40))
        target_probs = random_probs(rng, vocab_size)
        parts = judged(random_probs(rng, vocab_size), target_probs, mass, max_support)
        kept, recovered = kept_and_recovered(*parts)
        np.testing.assert_allclose(kept + recovered, target_probs, atol=1e-6)
        weights, tail_weight = residual(*parts[:3])
        assert weights.sum() + tail_weight == pytest.approx(1 - kept.sum(), abs=1e-6)


@pytest.mark.parametrize(("num_draft_tokens", "max_support"), [(1, 5), (3, 5), (3, 2), (4, 1)])
def test_block_verification_emits_the_targets_joint_distribution(
    num_draft_tokens: int, max_support: int
) -> None:
    """One round, then the target alone: summed over all draft tokens and stops, for random Markov models."""
    rng = np.random.default_rng(6)
    vocab_size, length = 5, num_draft_tokens + 1
    target = np.stack([random_probs(rng, vocab_size) for _ in range(vocab_size)]).astype(np.float64)
    draft = np.stack([random_probs(rng, vocab_size) for _ in range(vocab_size)])
    step = [judged(d, t, 0.9, max_support) for d, t in zip(draft, target.astype(np.float32), strict=True)]
    after = [np.ones((vocab_size,))]  # after[n][last token, next n tokens]: by the target alone
    for n in range(length):
        after.append(target.reshape(vocab_size, vocab_size, *[1] * n) * after[-1])
    emitted = np.zeros((vocab_size,) * length)
    for token_ids in itertools.product(range(vocab_size), repeat=num_draft_tokens):
        contexts = (0, *token_ids[:-1])
        supports = [step[last][0] for last in contexts]
        if not all(token in each.token_ids for token, each in zip(token_ids, supports, strict=True)):
            continue
        parts = [step[last] for last in contexts]
        proposal = Proposal(1, token_ids, supports)
        verdict = Verdict(1, [9] * length, [p[1] for p in parts], [p[2] for p in parts])
        drawn = np.prod([acceptance._token_probs(proposal, verdict, i)[0] for i in range(num_draft_tokens)])
        for num_kept, (probability, following) in enumerate(stops(proposal, verdict, parts)):
            last = (0, *token_ids)[num_kept]
            next_probs = target[last] if following is None else following
            rest = next_probs.reshape(-1, *[1] * (length - num_kept - 1)) * after[length - num_kept - 1]
            emitted[token_ids[:num_kept]] += drawn * probability * rest
    np.testing.assert_allclose(emitted, after[length][0], atol=1e-6)


def stops(
    proposal: Proposal, verdict: Verdict, parts: list[tuple[Support, np.ndarray, float, np.ndarray]]
) -> list[tuple[float, np.ndarray | None]]:
    """For 0, 1, ... tokens kept: its probability, and the next token's distribution; None for the bonus."""
    keep_probs = acceptance._keep_probs(proposal, verdict)
    left = 1 - keep_probs[-1]
    found: list[tuple[float, np.ndarray | None]] = [(keep_probs[-1], None)]
    for i in reversed(range(len(parts))):
        weights = acceptance._residual_at(proposal, verdict, i, keep_probs[i])
        following = weights[-1] * parts[i][3]
        following[parts[i][0].token_ids] += weights[:-1]
        coin = acceptance._stop_prob(weights, keep_probs[i]) if i else 1.0
        found.append((left * coin, following / (weights.sum() or 1)))
        left *= 1 - coin
    return found[::-1]


def test_block_verification_keeps_as_its_probabilities_say() -> None:
    """Over a grid of both coins: the first draft token is too likely, the second one makes up for it."""
    first, second = support([0, 1], [0.9, 0.1]), support([0, 1], [0.2, 0.8])
    proposal = Proposal(1, [0, 0], [first, second])
    verdict = Verdict(1, [7, 7, 5], [floats([0.45, 0.35]), floats([0.3, 0.3])], [0.2, 0.4])
    grid = (np.arange(40) + 0.5) / 40
    kept = [
        accept_by_block(proposal, verdict, np.array(coins), np.array([0.5, 0.5])).num_accepted
        for coins in itertools.product(grid, repeat=2)
    ]
    # p_1 = 1/2, p_2 = min(1, 1/2 · 0.3 / 0.2) = 3/4; h_1 = 0.2 / (0.2 + 1/2), as only the tail has a residual
    np.testing.assert_allclose(np.bincount(kept) / len(kept), [5 / 28, 2 / 28, 3 / 4], atol=0.02)


def accepted(
    proposal: Proposal, verdict: Verdict, accepting: list[float], recovering: list[float]
) -> Outcome:
    return accept_by_rejection(proposal, verdict, np.array(accepting), np.array(recovering))


def test_the_rule_realises_the_two_functions() -> None:
    """Over a fine grid of both coins, `accept_by_rejection` does what the algebra says."""
    draft = support([4, 1, 7], [0.5, 0.3, 0.2])
    target_probs, tail_mass, tail_token = floats([0.2, 0.4, 0.1]), 0.3, 9
    weights, tail_weight = residual(draft, target_probs, tail_mass)
    grid = (np.arange(2000) + 0.5) / 2000
    verdict = Verdict(0, [tail_token, 2], [target_probs], [tail_mass])
    for slot, token_id in enumerate(draft.token_ids.tolist()):
        proposal = Proposal(0, [token_id], [draft])
        outcomes = [accepted(proposal, verdict, [u], [0.5]) for u in grid]
        rate = sum(outcome.num_accepted for outcome in outcomes) / len(grid)
        expected = acceptance_probability(float(draft.probs[slot]), float(target_probs[slot]))
        assert rate == pytest.approx(expected, abs=1e-3)
        assert {outcome.next_token for outcome in outcomes if outcome.num_accepted} == {2}
    outcomes = [accepted(Proposal(0, [4], [draft]), verdict, [0.9], [u]) for u in grid]
    counts = np.bincount([outcome.next_token for outcome in outcomes], minlength=10) / len(grid)
    total = weights.sum() + tail_weight
    np.testing.assert_allclose(counts[draft.token_ids], weights / total, atol=1e-3)
    assert counts[tail_token] == pytest.approx(tail_weight / total, abs=1e-3)


@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])
def test_a_token_without_target_mass_is_never_emitted(rule: Any, u: float) -> None:
    draft = support([0, 1, 2], [0.4, 0.3, 0.3])
    verdict = Verdict(5, [-1, 8], [floats([0, 1, 0])], [0.0])
    for token_id in (0, 2):
        outcome = rule(Proposal(5, [token_id], [draft]), verdict, np.array([u]), np.array([u]))
        assert outcome == Outcome(range(0), 1)
    assert rule(Proposal(5, [1], [draft]), verdict, np.array([u]), np.array([u])) == Outcome(range(1), 8)


def test_recovered_token_comes_from_the_tail_when_the_support_has_no_residual() -> None:
    draft = support([3], [1.0])
    verdict = Verdict(0, [6, 8], [floats([0.5])], [0.5])
    for u in (0.0, 0.4, ALMOST_ONE):
        assert accepted(Proposal(0, [3], [draft]), verdict, [0.5], [u]) == Outcome(range(0), 6)
    assert accepted(Proposal(0, [3], [draft]), verdict, [0.4999], [0.1]) == Outcome(range(1), 8)


def test_a_missing_tail_token_has_no_weight() -> None:
    draft = support([3, 4], [0.9, 0.1])
    verdict = Verdict(0, [-1, 8], [floats([0.4, 0.6])], [1e-12])
    outcome = accepted(Proposal(0, [3], [draft]), verdict, [0.99], [ALMOST_ONE])
    assert outcome == Outcome(range(0), 4)


def test_residual_emptied_by_rounding_falls_back_to_the_target() -> None:
    draft = support([3, 4], [0.5, 0.5])
    almost = np.nextafter(np.float32(0.5), np.float32(0))
    verdict = Verdict(0, [-1, 8], [np.array([almost, almost])], [0.0])
    outcomes = [accepted(Proposal(0, [3], [draft]), verdict, [ALMOST_ONE], [u]) for u in (0.0, 0.7)]
    assert outcomes == [Outcome(range(0), 3), Outcome(range(0), 4)]


def test_the_first_rejection_ends_the_round() -> None:
    draft = support([0, 1], [0.5, 0.5])
    judgements = [floats([0.5, 0.5]), floats([0, 1]), floats([0.5, 0.5])]
    verdict = Verdict(9, [-1, -1, -1, 1], judgements, [0.0, 0.0, 0.0])
    for token_ids, num_kept in (([0, 0, 0], 1), ([0, 1, 0], 3)):
        outcome = accepted(Proposal(9, token_ids, [draft] * 3), verdict, [0.1] * 3, [0.1] * 3)
        assert outcome == Outcome(range(num_kept), 1)


@pytest.mark.parametrize(
    ("draft_tokens", "target_tokens", "outcome"),
    [
        ([], [4], Outcome(range(0), 4)),
        ([1, 2], [1, 2, 3], Outcome(range(2), 3)),
        ([1, 2], [1, 5, 3], Outcome(range(1), 5)),
        ([1, 2], [7, 2, 3], Outcome(range(0), 7)),
    ],
)
def test_matching_keeps_the_longest_equal_prefix(
    draft_tokens: list[int], target_tokens: list[int], outcome: Outcome
) -> None:
    assert accept_by_match(Proposal(3, draft_tokens), Verdict(3, target_tokens)) == outcome
    for params in (SamplingParams(temperature=0), SamplingParams(rule=Rule.GUMBEL)):
        assert accept(Proposal(3, draft_tokens), Verdict(3, target_tokens), params, seed=1) == outcome


def test_an_empty_proposal_yields_the_bonus_token() -> None:
    assert accept(Proposal(3), Verdict(3, [7]), SamplingParams(), seed=1) == Outcome(range(0), 7)


@pytest.mark.parametrize(
    ("rule", "accept_by"), [(Rule.REJECTION, accept_by_rejection), (Rule.BLOCK, accept_by_block)]
)
def test_accept_addresses_its_coins_by_position_and_base(rule: Rule, accept_by: Callable[..., Any]) -> None:
    draft = support(range(8), np.full(8, 1 / 8))
    target_probs = floats(np.arange(8) / 28)
    for base_len in range(1, 40):
        proposal = Proposal(base_len, [3, 2, 1], [draft] * 3)
        verdict = Verdict(base_len, [-1, -1, -1, 5], [target_probs] * 3, [0.0] * 3)
        positions = range(base_len, base_len + 3)
        streams = Purpose.ACCEPT, Purpose.RESIDUAL
        coins = (uniforms(11, stream, positions, base_len) for stream in streams)
        expected = accept_by(proposal, verdict, *coins)
        assert accept(proposal, verdict, SamplingParams(rule=rule), seed=11) == expected


_DRAFT = support([0, 1], [0.5, 0.5])
_TARGET = floats([0.5, 0.5])


@pytest.mark.parametrize(
    ("proposal", "verdict"),
    [
        (Proposal(4, [0], [_DRAFT]), Verdict(5, [-1, 0], [_TARGET], [0.0])),
        (Proposal(4, [0], [_DRAFT]), Verdict(4, [-1], [_TARGET], [0.0])),
        (Proposal(4, [0], [_DRAFT]), Verdict(4, [-1, 0], [], [])),
        (Proposal(4, [0], []), Verdict(4, [-1, 0], [_TARGET], [0.0])),
        (Proposal(4, [0], [_DRAFT]), Verdict(4, [-1, 0], [floats([1])], [0.0])),
        (Proposal(4, [2], [_DRAFT]), Verdict(4, [-1, 0], [_TARGET], [0.0])),
        (Proposal(4, [0], [support([], [])]), Verdict(4, [-1, 0], [floats([])], [0.0])),
        (Proposal(4, [0], [support([0, 1], [0, 1])]), Verdict(4, [-1, 0], [_TARGET], [0.0])),
        (Proposal(4, [0], [_DRAFT]), Verdict(4, [-1, 0], [floats([np.nan, np.nan])], [0.0])),
        (Proposal(4, [0], [_DRAFT]), Verdict(4, [-1, 0], [floats([0, 0])], [0.0])),
    ],
)
@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block])
def test_a_verdict_that_does_not_fit_is_refused(rule: Any, proposal: Proposal, verdict: Verdict) -> None:
    with pytest.raises(InternalError):
        rule(proposal, verdict, np.array([0.999]), np.array([0.5]))
