"""Several lists of Gumbel noise: whose distribution a draw has, and how often chains have the target's token.

Closed forms over small vocabularies first, then the code that draws, held to them.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from draft_service.lists import shared_out
from specwire.core import Rule, SamplingParams
from specwire.errors import InvalidRequestError
from specwire.rule import rows as rule_rows
from specwire.rule.columns import Encoded, Rows
from specwire.rule.random import gumbel_noise
from specwire.rule.rows import Race, choose_matched, coupled_noise, raced_scores
from specwire.rule.sampling import greedy
from tests.support.lists import match_probability, matching_bound
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE, chi_square_p_value

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NUM_DRAWS = 20_000
TARGET = np.array([0.4, 0.3, 0.2, 0.1])
DRAFT = np.array([0.25, 0.1, 0.6, 0.05])
SHARES = [(1,), (4,), (1, 1), (2, 2), (2, 1), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1)]
"""Lists of each chain."""


def random_pair(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    alpha = rng.choice([0.3, 1.0, 4.0], size=2)
    size = int(rng.integers(2, 6))
    return rng.dirichlet([alpha[0]] * size), rng.dirichlet([alpha[1]] * size)


PAIRS = [random_pair(seed) for seed in range(40)]


# --- closed forms -----------------------------------------------------------------------------------------


def test_acceptance_is_not_below_the_list_matching_lemma() -> None:
    """Of one chain the bound is exact."""
    for (draft, target), num in itertools.product(PAIRS, (1, 2, 3)):
        found, bound = match_probability(draft, target, [1] * num), matching_bound(draft, target, num)
        assert found > bound - 1e-12
        assert num > 1 or found == pytest.approx(bound, abs=1e-12)


def test_more_chains_match_more_often() -> None:
    """No coupling of n draws with the target's token exceeds Σ min(target, n · draft). Chains with two lists
    each are as chains with one."""
    for draft, target in PAIRS:
        found = [match_probability(draft, target, [1] * num) for num in (1, 2, 3)]
        assert all(more > less - 1e-12 for less, more in itertools.pairwise(found))
        for num, each in enumerate(found, start=1):
            assert each <= np.minimum(target, num * draft).sum() + 1e-12
        assert match_probability(draft, target, [2, 2]) == pytest.approx(found[1], abs=1e-12)
        assert match_probability(draft, target, [5]) == pytest.approx(found[0], abs=1e-12)


def test_a_draft_that_is_the_target_always_matches() -> None:
    """Whichever list wins, its chain has the token. A chain that leaves lists out does not."""
    for _, target in PAIRS:
        for shares in SHARES:
            assert match_probability(target, target, shares) == pytest.approx(1, abs=1e-12)


# --- the code that draws ----------------------------------------------------------------------------------


def rows_of(num_lists: int | None, num: int = NUM_DRAWS, seed: int = 3) -> Rows:
    """Of one sequence, at successive positions."""
    params = SamplingParams(rule=Rule.GUMBEL, num_lists=num_lists)
    return Rows([Encoded.of(params, seed)], [num], [0], [0])


def log_probs(probs: np.ndarray, num: int = NUM_DRAWS) -> torch.Tensor:
    return torch.from_numpy(np.log(probs)).float().expand(num, -1)


def draws(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of the target, [NUM_DRAWS], and of the chains, [num_chains, NUM_DRAWS]."""
    rows = rows_of(sum(shares))
    ends = [*itertools.accumulate(shares)]
    chains = [
        [Race(row, range(end - num, end)) for row in range(NUM_DRAWS)]
        for num, end in zip(shares, ends, strict=True)
    ]
    scores = [raced_scores(log_probs(DRAFT), rows, races) for races in chains]
    own = choose_matched(log_probs(TARGET), rows).numpy()
    return own, np.stack([greedy(each).numpy() for each in scores])


@pytest.mark.sample(4)
@pytest.mark.parametrize("shares", SHARES)
def test_draws_have_their_distributions_and_match_as_often_as_they_should(shares: tuple[int, ...]) -> None:
    own, of_chains = draws(shares)
    size, bound = len(TARGET), FALSE_ALARM_RATE / (3 + len(shares))
    assert chi_square_p_value(np.bincount(own, minlength=size), TARGET) > bound
    for each in of_chains:
        assert chi_square_p_value(np.bincount(each, minlength=size), DRAFT) > bound
    if len(shares) > 1:
        assert independence_p_value(of_chains) > bound
    matched = int((of_chains == own).any(axis=0).sum())
    expected = match_probability(DRAFT, TARGET, shares)
    assert chi_square_p_value([matched, NUM_DRAWS - matched], [expected, 1 - expected]) > bound


def independence_p_value(of_chains: np.ndarray) -> float:
    """Of the first two chains."""
    counts = np.zeros((len(DRAFT), len(DRAFT)))
    np.add.at(counts, tuple(of_chains[:2]), 1)
    return chi_square_p_value(counts, np.outer(DRAFT, DRAFT))


def test_wrong_races_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: two chains with one list; the smallest of the lists instead of the largest; their sum."""
    rows, races = rows_of(2), [Race(row, [0]) for row in range(NUM_DRAWS)]
    same = greedy(raced_scores(log_probs(DRAFT), rows, races)).numpy()
    assert independence_p_value(np.stack([same, same])) < CLEARLY_WRONG
    for wrong in (torch.minimum, torch.add):
        with monkeypatch.context() as changed:
            changed.setattr(torch, "maximum", wrong)
            own = choose_matched(log_probs(TARGET), rows_of(2)).numpy()
        assert chi_square_p_value(np.bincount(own, minlength=4), TARGET) < CLEARLY_WRONG


def test_one_list_is_the_coupling_of_today_to_the_last_bit() -> None:
    seeds, positions = np.array([1, 2, 3]), np.array([10, 2**40, 12])
    noise = gumbel_noise(seeds, positions, 101)
    assert (coupled_noise(seeds, positions, np.ones(3, np.int64), 101, CPU).numpy() == noise).all()
    own = [choose_matched(log_probs(TARGET, 50), rows_of(num, 50)) for num in (None, 1)]
    assert (own[0] == own[1]).all()
    assert (choose_matched(log_probs(TARGET, 50), rows_of(2, 50)) != own[0]).any()


def test_rows_of_a_step_have_lists_of_their_own_number() -> None:
    seeds, positions, nums = np.array([1, 2, 3, 2]), np.array([7, 8, 9, 8]), np.array([1, 3, 2, 4])
    together = coupled_noise(seeds, positions, nums, 33, CPU)
    for i in range(4):
        of_lists = [gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 33, None, k) for k in range(nums[i])]
        assert (together[i].numpy() == np.max(of_lists, axis=0)[0]).all()
        assert len({each.tobytes() for each in of_lists}) == nums[i]


def test_races_of_different_widths_are_as_each_alone() -> None:
    races = [Race(0, [0]), Race(1, range(0, 4, 2)), Race(1, [1, 3]), Race(0, range(1, 4))]
    rows, scores = rows_of(4, 2), log_probs(DRAFT, 2)
    together = raced_scores(scores, rows, races)
    for i, race in enumerate(races):
        assert (together[i] == raced_scores(scores, rows, [race])[0]).all()
    best_of_all = torch.maximum(together[0], together[3])
    assert (best_of_all == rule_rows.matched_scores(scores, rows)[0]).all()


@pytest.mark.parametrize("num_lists", [1, 2, 3, 4, 8])
def test_lists_are_shared_out_at_every_node(num_lists: int) -> None:
    """All of them, each to one chain, and none is left without."""
    for num_chains in range(1, num_lists + 1):
        for at in itertools.islice(itertools.product(range(3), repeat=num_chains), 200):
            races = shared_out(num_lists, at)
            assert [race.row for race in races] == list(at)
            for row in set(at):
                shares = [race.lists for race in races if race.row == row]
                assert min(map(len, shares)) >= 1
                assert sorted(index for share in shares for index in share) == list(range(num_lists))


def test_parameters_that_do_not_combine() -> None:
    for given, problem in (
        ({"num_lists": 0}, "num_lists=0: must lie in"),
        ({"num_lists": 9}, "num_lists=9: must lie in"),
        ({"num_lists": True}, "num_lists=True: must lie in"),
        ({"num_lists": 2, "rule": "block"}, "num_lists=2: needs rule gumbel"),
        ({"num_lists": 2, "max_depth": 4}, "num_lists=2: does not combine with max_depth=4"),
    ):
        with pytest.raises(InvalidRequestError, match=problem):
            SamplingParams(**given)
    assert SamplingParams(num_lists=1, rule=Rule.BLOCK).num_coupled_lists == 1
    assert SamplingParams(num_lists=4, temperature=0).num_coupled_lists == 1
