"""A sequence's tokens and the cache behind them, when what was proposed is replaced by what was committed."""

from __future__ import annotations

import pytest

from specwire import SamplingParams
from specwire.engine.cache.kv_cache import PagePool
from specwire.engine.jobs import TokenSequence
from specwire.errors import PrefixMismatchError
from specwire.proposals.tree import TokenTree
from tests.support.integrity import check_integrity

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


@pytest.mark.parametrize(
    ("committed", "num_run"),
    [
        ([4, 6, 9], 1),  # the path 4, 6 has moved together
        ([4, 6], 1),  # the last token always runs again
        ([5, 6], 1),  # 6 follows 4 alone
        ([5, 7, 8, 9], 2),  # 8 was not computed
        ([9], 1),
        ([], 1),
    ],
)
def test_of_a_tree_the_committed_path_stays_computed(committed: list[int], num_run: int) -> None:
    """Three tokens, then 4 ── 6 and 5 ── 7 ── 8, all but the last of them computed."""
    cache = PagePool(num_pages=4, page_size=4).new_sequence()
    cache.append(7)
    tree = TokenTree(3, (-1, -1, 0, 1, 3))
    sequence = TokenSequence(SamplingParams(seed=1), 3, cache, 0, [1, 2, 3, 4, 5, 6, 7, 8], tree)
    with pytest.raises(PrefixMismatchError):
        sequence.rebase(4, [6])
    fork = TokenSequence(SamplingParams(seed=1), 3, cache.pool.new_sequence(), 1)
    with pytest.raises(PrefixMismatchError):
        fork.fork_from(sequence, 4)
    assert (sequence.tree, cache.length) == (tree, 7)
    sequence.rebase(2, [3, *committed])
    assert (sequence.tokens, sequence.tree) == ([1, 2, 3, *committed], None)
    assert len(sequence.tokens) - cache.length == num_run
    check_integrity(cache.pool)


def test_a_fork_of_a_sequence_with_a_tree_has_what_precedes_it() -> None:
    cache = PagePool(num_pages=4, page_size=4).new_sequence()
    cache.append(5)
    sequence = TokenSequence(SamplingParams(seed=1), 3, cache, 0, [1, 2, 3, 4, 5], TokenTree(3, (-1, -1)))
    fork = TokenSequence(SamplingParams(seed=1), 3, cache.pool.new_sequence(), 1)
    fork.fork_from(sequence, 3)
    assert (fork.tokens, fork.tree, fork.cache.length) == ([1, 2, 3], None, 3)


def test_more_than_is_held_changes_nothing(sequence: TokenSequence) -> None:
    with pytest.raises(PrefixMismatchError):
        sequence.rebase(7, [1])
    assert (sequence.tokens, sequence.cache.length) == (HELD, 5)
