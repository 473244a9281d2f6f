"""A sequence's tokens and the cache behind them, when what was proposed is replaced by what was committed."""

from __future__ import annotations

import pytest

from specwire import SamplingParams
from specwire.engine.cache.kv_cache import PagePool
from specwire.engine.jobs import TokenSequence
from specwire.errors import PrefixMismatchError

HELD = [1, 2, 3, 4, 5, 6]


@pytest.fixture
def sequence() -> TokenSequence:
    """Six tokens, five of them computed, as after a proposal of three."""
    cache = PagePool(num_pages=4, page_size=4).new_sequence()
    cache.append(5)
    return TokenSequence(SamplingParams(seed=1), 3, cache, 0, list(HELD))


@pytest.mark.parametrize(
    ("committed", "num_computed"),
    [
        ([4, 5, 6, 7], 5),  # all of it, and one more
        ([4, 9], 4),  # the last token always runs again
        ([4, 9, 6], 4),  # what follows another token is another context
        ([9, 5, 6], 3),
        ([4, 5], 4),
        ([], 2),
    ],
)
def test_what_still_holds_stays_computed(
    sequence: TokenSequence, committed: list[int], num_computed: int
) -> None:
    sequence.rebase(3, committed)
    assert sequence.tokens == HELD[:3] + committed
    assert sequence.cache.length == num_computed


def test_more_than_is_held_changes_nothing(sequence: TokenSequence) -> None:
    with pytest.raises(PrefixMismatchError):
        sequence.rebase(7, [1])
    assert (sequence.tokens, sequence.cache.length) == (HELD, 5)
