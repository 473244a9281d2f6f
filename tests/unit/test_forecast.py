"""What is thought of a text: Bayes' rule against counting, and how fast it follows."""

from __future__ import annotations

import numpy as np
import pytest

from specwire.proposals.estimate.acceptance import NUM_POSITIONS, OwnAcceptance, SharedAcceptance

EASY, HARD = 0.95, 0.3


def judged(rng: np.random.Generator, alpha: float, num_drafted: int) -> int:
    """How many of so many draft tokens are accepted."""
    return int(np.argmin([*(rng.random(num_drafted) < alpha), False]))


def train(shared: SharedAcceptance, alphas: list[float], num_rounds: int) -> list[OwnAcceptance]:
    """A stream of each kind of text."""
    rng = np.random.default_rng(0)
    streams = [OwnAcceptance(shared) for _ in alphas]
    for _ in range(num_rounds):
        for stream, alpha in zip(streams, alphas, strict=True):
            stream.add(6, judged(rng, alpha, 6))
    return streams


def test_what_is_reached_begins_at_one_and_falls() -> None:
    for stream in train(SharedAcceptance(), [0.0, 0.5, 1.0], 50):
        reached = stream.reached(2 * NUM_POSITIONS)
        assert len(reached) == 2 * NUM_POSITIONS + 1
        assert reached[0] == pytest.approx(1.0)
        assert reached == sorted(reached, reverse=True)
        assert reached[-1] >= 0


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
def test_trees_are_believed_to_accept_more_until_they_were_judged(alpha: float) -> None:
    chains = SharedAcceptance()
    train(chains, [alpha], 300)
    small, large = chains.of_trees(16), chains.of_trees(64)
    assert chains.tokens()[4] < small.tokens()[4] < large.tokens()[4] < 5
    assert small.tokens()[4] == pytest.approx(chains.tokens(16)[4], rel=0.05)
    assert large.of_trees(1 / 64).tokens()[4] == pytest.approx(chains.tokens()[4], rel=0.1)
    train(large, [alpha], 300)
    assert large.tokens()[4] == pytest.approx(chains.tokens()[4], rel=0.05)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.6, 0.8, 0.95])
def test_where_all_texts_are_alike_it_is_the_closed_form(alpha: float) -> None:
    """P(at least k accepted) = α^k; on the average of what is believed at any time."""
    shared, rng = SharedAcceptance(), np.random.default_rng(1)
    stream = OwnAcceptance(shared)
    believed = []
    for i in range(3000):
        stream.add(4, judged(rng, alpha, 4))
        if i >= 1000:
            believed.append(stream.reached(4))
    assert np.mean(believed, axis=0) == pytest.approx([alpha**k for k in range(5)], abs=0.05)


def test_easy_and_hard_texts_are_told_apart() -> None:
    """By what each is itself, not by half of what all are."""
    easy, hard = train(SharedAcceptance(), [EASY, HARD], 300)
    assert easy.reached(8)[8] == pytest.approx(EASY**8, abs=0.12)
    assert hard.reached(1)[1] == pytest.approx(HARD, abs=0.12)
    assert hard.reached(8)[8] < 0.01


@pytest.mark.parametrize(("before", "after"), [(EASY, HARD), (HARD, EASY)])
def test_a_change_is_noticed_within_a_few_rounds(before: float, after: float) -> None:
    shared = SharedAcceptance()
    train(shared, [EASY, HARD], 300)
    num_rounds = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        stream = OwnAcceptance(shared)
        for _ in range(40):
            stream.add(4, judged(rng, before, 4))
        middle = (EASY + HARD) / 2
        count = 0
        while (stream.reached(1)[1] > middle) == (before > middle):
            stream.add(4, judged(rng, after, 4))
            count += 1
        num_rounds.append(count)
    assert np.median(num_rounds) <= 3
    assert max(num_rounds) <= 12


def test_a_new_text_is_of_the_usual_kinds() -> None:
    """Easy or hard, and so rather all or nothing: more than the mean acceptance to the power of k."""
    shared = SharedAcceptance()
    train(shared, [EASY, HARD], 1500)
    reached = OwnAcceptance(shared).reached(8)
    assert reached[8] > 2 * reached[1] ** 8


def test_rounds_without_draft_tokens_only_let_time_pass() -> None:
    """What was known of the text is known no more; what is known of all texts stays."""
    shared = SharedAcceptance()
    easy, hard = train(shared, [EASY, HARD], 300)
    before = np.array(shared.reached_likelihoods)
    for _ in range(600):
        hard.add(0, 0)
    assert hard.reached(4) == pytest.approx(OwnAcceptance(shared).reached(4), abs=0.02)
    assert np.array_equal(shared.reached_likelihoods, before)
    assert easy.reached(1)[1] > 0.8


def test_acceptance_by_position_is_followed() -> None:
    """A draft that loses its way after two tokens, as one of fixed heads does."""
    shared, rng = SharedAcceptance(), np.random.default_rng(3)
    stream = OwnAcceptance(shared)
    for _ in range(800):
        first = judged(rng, 0.9, 2)
        stream.add(4, first if first < 2 else 2 + judged(rng, 0.2, 2))
    reached = stream.reached(4)
    assert reached[2] == pytest.approx(0.81, abs=0.12)
    assert reached[3] / reached[2] == pytest.approx(0.2, abs=0.15)


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (0.0, 1.0)])
def test_what_was_always_or_never_accepted_for_long_is_learnt_anew(before: float, after: float) -> None:
    """However long it was: the log odds do not grow where acceptance does not."""
    shared = SharedAcceptance()
    own = OwnAcceptance(shared)
    for _ in range(20_000):
        own.add(4, int(4 * before))
    for _ in range(300):
        own.add(4, int(4 * after))
    assert shared.tokens()[4] == pytest.approx(1 + 4 * after, abs=0.5)
