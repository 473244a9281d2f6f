"""How many guesses of an inner drafter are run: many where they are right, none where they do not pay."""

from __future__ import annotations

import random

import pytest

from draft_service.inner.pace import MOST_GUESSES, Pace
from specwire.proposals.history import Guess

LOOK = Guess([], [], 0, 0.5)
FREE = [1.0] * (MOST_GUESSES + 1)
"""A pass costs the same with any number of guesses."""


def run(pace: Pace, share: float, times: list[float], num_passes: int) -> tuple[list[int], float, float]:
    """Guesses of each pass, tokens drawn, and the time of all passes; each guess is right by chance."""
    coins, nums, tokens, spent = random.Random(0), [], 0, 0.0
    for _ in range(num_passes):
        num = pace.num_guesses(LOOK, times) if pace.is_due() else 0
        num_right = 0
        while num_right < num and coins.random() < share:
            num_right += 1
        if num:
            pace.add(LOOK.kind, num_right, num)
        nums.append(num)
        tokens += 1 + num_right
        spent += times[num]
    return nums, tokens, spent


def test_all_are_run_where_they_are_right_and_free() -> None:
    nums, *_ = run(Pace(), 1.0, FREE, 50)
    assert nums[-1] == MOST_GUESSES


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("token_cost", [0.0, 0.05, 0.5, 1.5])
def test_it_is_never_much_slower_than_without(share: float, token_cost: float) -> None:
    """The last 2,000 passes bring at least 0.98 times the tokens a second of passes without guesses."""
    times = [1 + token_cost * num for num in range(MOST_GUESSES + 1)]
    pace = Pace()
    run(pace, share, times, 200)
    _, tokens, spent = run(pace, share, times, 2000)
    assert tokens / spent > 0.98


def test_guesses_that_become_right_are_noticed() -> None:
    times = [1 + 0.3 * num for num in range(MOST_GUESSES + 1)]
    pace = Pace()
    nums, *_ = run(pace, 0.0, times, 500)
    assert sum(nums[-100:]) < 10
    nums, *_ = run(pace, 1.0, times, 300)
    assert nums[-1] > 4


def test_nothing_known_is_not_looked_for_all_the_time() -> None:
    pace = Pace()
    num_looks = 0
    for _ in range(160):
        if pace.is_due():
            num_looks += 1
            assert pace.num_guesses(None, FREE) == 0
    assert num_looks < 16
