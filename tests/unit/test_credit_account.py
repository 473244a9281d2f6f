"""A credit as a sum, without any network: what is spent, acknowledged and left."""

from __future__ import annotations

import random

import pytest

from coordinator.credit import Credit
from specwire import InvalidRequestError
from specwire.core import MAX_CREDIT_TOKENS, MAX_UNACKNOWLEDGED_TOKENS, MIN_CREDIT_TOKENS
from tests.support.paused import most_ahead


@pytest.mark.parametrize("round_len", [1, 5, 49, 50, 65])
def test_without_acknowledgements_it_goes_this_far(round_len: int) -> None:
    credit, num_emitted = Credit(MIN_CREDIT_TOKENS, round_len), 0
    while credit.has_room:
        credit.spend(num_emitted=round_len, num_sent=round_len)
        num_emitted += round_len
    assert most_ahead(round_len) - round_len < num_emitted <= most_ahead(round_len)


@pytest.mark.parametrize("seed", range(20))
def test_client_and_generation_never_wait_for_each_other(seed: int) -> None:
    """Rounds, tokens held back and acknowledgements of any sizes that the contract allows."""
    rng = random.Random(seed)
    round_len, window = rng.randint(1, 65), rng.choice([64, 65, 200])
    credit = Credit(window, round_len)
    num_sent = num_held = num_kept_back = 0
    while num_sent < 2_000:
        if credit.has_room:
            num_emitted = rng.randint(1, round_len)
            num_released = rng.choice([0, rng.randint(0, num_held + num_emitted), num_held + num_emitted])
            credit.spend(num_emitted=num_emitted, num_sent=num_released)
            num_held += num_emitted - num_released
            num_sent += num_released
            num_kept_back += num_released
        else:
            assert num_kept_back > MAX_UNACKNOWLEDGED_TOKENS, "both wait"
            rest = rng.randint(0, MAX_UNACKNOWLEDGED_TOKENS)
            credit.acknowledge(num_kept_back - rest)
            num_kept_back = rest


def test_held_back_tokens_count_as_ahead() -> None:
    credit = Credit(64, 5)
    credit.spend(num_emitted=20, num_sent=20)
    assert credit.has_room
    credit.spend(num_emitted=40, num_sent=0)
    assert not credit.has_room
    credit.acknowledge(4)  # one is as good as another, and 16 are still unread
    assert credit.has_room


def test_more_than_the_limit_is_refused() -> None:
    credit = Credit(MAX_CREDIT_TOKENS - 10, 5)
    credit.acknowledge(10)
    with pytest.raises(InvalidRequestError, match=r"credit_tokens=1: makes 1048577 unused"):
        credit.acknowledge(1)
    credit.spend(num_emitted=5, num_sent=5)
    credit.acknowledge(5)
