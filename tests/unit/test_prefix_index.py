"""Cached pages: found by their tokens, never both free and findable, given up in a sensible order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specwire.engine.cache.kv_cache import PagePool, SequenceCache
from specwire.engine.cache.prefix import ROOT, root
from specwire.errors import InternalError, ResourceExhaustedError
from tests.support.integrity import IntegrityError, check_integrity
from tests.support.slot_memory import runs_in

SIZE = 4


@pytest.fixture
def pool() -> PagePool:
    return PagePool(8, SIZE)


def filled(pool: PagePool, tokens: list[int], salt: str = "") -> SequenceCache:
    """A sequence that adopted what is known of the tokens, computed the rest, and is known itself."""
    sequence = pool.new_sequence()
    sequence.root = root(salt)
    sequence.reuse_prefix(tokens, len(tokens))
    sequence.append(len(tokens) - sequence.length)
    sequence.remember(tokens)
    check_integrity(pool)
    return sequence


def found(pool: PagePool, tokens: list[int], salt: str = "") -> int:
    """Tokens that would be found; leaves no trace but their age."""
    with pool.new_sequence() as sequence:
        sequence.root = root(salt)
        return sequence.reuse_prefix(tokens, len(tokens))


def test_complete_pages_are_found_again_and_shared(pool: PagePool) -> None:
    first = filled(pool, list(range(10)))
    second = pool.new_sequence()
    assert second.reuse_prefix(list(range(12)), 12) == 8, "the third page is not complete"
    assert second.pages == first.pages[:2]
    assert runs_in(second) == [(0, 8)]
    assert (pool.num_held_pages, pool.num_cached_pages) == (3, 0)
    first.release()
    assert (pool.num_held_pages, pool.num_cached_pages) == (2, 0)
    second.release()
    assert (pool.num_held_pages, pool.num_cached_pages, pool.num_free_pages) == (0, 2, 8)
    assert found(pool, [0, 1, 2, 3, 9, 9, 9, 9]) == 4
    assert found(pool, [9, 1, 2, 3, 4, 5, 6, 7]) == 0
    check_integrity(pool)


def test_another_salt_finds_nothing() -> None:
    pool = PagePool(64, SIZE)
    tokens = list(range(12))
    salts = ("", "alice", "bob")
    sequences = [filled(pool, tokens, salt) for salt in salts]
    assert pool.num_held_pages == 9, "each has pages of its own"
    assert found(pool, tokens, "carol") == 0
    sequences[1].release()
    assert [found(pool, tokens, salt) for salt in salts] == [12, 12, 12]
    with sequences[2].fork() as twin:
        twin.append(SIZE)
        twin.remember(more := [*tokens, 1, 2, 3, 4])
    sequences[2].truncate(0)
    assert [found(pool, more, salt) for salt in salts] == [12, 12, 16], "forks and rolled back ones keep it"
    with pool.new_sequence() as greedy:
        greedy.append(61 * SIZE)  # all that is not held
    check_integrity(pool)
    assert (found(pool, tokens), found(pool, tokens, "alice"), found(pool, tokens, "bob")) == (12, 0, 0)


@pytest.mark.parametrize(("max_tokens", "expected"), [(-1, 0), (3, 0), (4, 4), (7, 4), (8, 8), (99, 8)])
def test_no_more_is_adopted_than_wanted(pool: PagePool, max_tokens: int, expected: int) -> None:
    tokens = list(range(9))
    filled(pool, tokens)
    assert pool.new_sequence().reuse_prefix(tokens, max_tokens) == expected


def test_only_an_empty_sequence_adopts(pool: PagePool) -> None:
    sequence = filled(pool, [1])
    with pytest.raises(InternalError, match="empty"):
        sequence.reuse_prefix([1, 2, 3, 4], 4)


def test_a_rollback_into_a_page_forgets_it_and_what_follows_when_it_is_written(pool: PagePool) -> None:
    tokens = list(range(12))
    sequence = filled(pool, tokens)
    sequence.truncate(6)
    assert pool.num_cached_pages == 1
    assert found(pool, tokens) == 12, "nothing was overwritten yet"
    sequence.append(1)
    assert pool.copies.take() is None
    check_integrity(pool)
    assert (found(pool, tokens), pool.num_cached_pages) == (4, 0)
    sequence.append(1)
    sequence.remember([*tokens[:6], 50, 51])
    assert found(pool, [*tokens[:6], 50, 51]) == 8


def test_the_same_content_twice_is_known_once(pool: PagePool) -> None:
    tokens = list(range(8))
    first, second = pool.new_sequence(), pool.new_sequence()
    for sequence in (first, second):
        sequence.append(8)
        sequence.remember(tokens)
    check_integrity(pool)
    second.release()
    assert (pool.num_cached_pages, pool.num_held_pages) == (0, 2)
    first.release()
    assert (pool.num_cached_pages, pool.num_held_pages) == (2, 0)


def test_the_least_recently_used_goes_first_and_of_a_chain_the_deepest_page() -> None:
    pool = PagePool(6, SIZE)
    old, young = list(range(8)), list(range(100, 108))
    filled(pool, old).release()
    filled(pool, young).release()
    assert (pool.num_cached_pages, pool.num_free_pages) == (4, 6)
    assert found(pool, old) == 8  # used again: now `young` is the older one
    holding = [pool.new_sequence() for _ in range(2)]
    for sequence in holding:
        sequence.append(SIZE)
    assert (pool.num_cached_pages, pool.num_free_pages) == (4, 4), "free pages are taken first"
    for expected in ((8, 4), (8, 0), (4, 0), (0, 0)):
        holding.append(pool.new_sequence())
        holding[-1].append(SIZE)
        check_integrity(pool)
        assert (found(pool, young), found(pool, old))[::-1] == expected
    with pytest.raises(ResourceExhaustedError, match="0 of 6 are free"):
        pool.new_sequence().append(1)


def test_no_orphan_stays_when_a_page_in_front_goes() -> None:
    """Two pages have the same tokens; the one that is known goes, and what followed it under the other stays
    in use, unknown until its holder names the whole chain again."""
    pool = PagePool(6, SIZE)
    tokens = list(range(12))
    known, twin = pool.new_sequence(), pool.new_sequence()
    known.append(4)
    twin.append(4)
    known.remember(tokens)
    twin.remember(tokens)  # the page itself is known already, under the other sequence
    twin.append(4)
    twin.remember(tokens)
    assert found(pool, tokens) == 8
    known.release()
    hungry = pool.new_sequence()
    hungry.append(4 * SIZE)
    check_integrity(pool)
    assert found(pool, tokens) == 0
    hungry.release()
    twin.append(4)
    twin.remember(tokens)
    check_integrity(pool)
    assert found(pool, tokens) == 12


def test_growth_stays_contiguous_when_all_memory_is_cached() -> None:
    rng, pool, live, runs = random.Random(0), PagePool(1024, 16), [], []
    for step in range(300):
        tokens = [step * 1000 + i for i in range(rng.randint(16, 400))]
        live.append((pool.new_sequence(), tokens))
        live[-1][0].append(len(tokens))
        for sequence, own in live:
            own.extend(range(8))
            sequence.append(8)
            sequence.remember(own)
        while pool.num_held_pages > 0.2 * pool.num_pages:
            sequence, _ = live.pop(rng.randrange(len(live)))
            runs.append(len(runs_in(sequence)))
            sequence.release()
    check_integrity(pool)
    assert pool.num_cached_pages > 100
    assert np.mean(runs) < 4


def test_integrity_names_a_page_both_free_and_findable() -> None:
    pool = PagePool(4, SIZE)
    sequence = filled(pool, list(range(8)))
    pool._index.add(ROOT, b"elsewhere", 3)
    with pytest.raises(IntegrityError, match=r"\[3\] are both free and findable"):
        check_integrity(pool)
    sequence.release()


def test_integrity_names_an_orphan() -> None:
    pool = PagePool(4, SIZE)
    sequence = filled(pool, list(range(8)))
    sequence.append(4)
    pool._index.add(b"nobody", b"orphan", sequence.pages[2])
    with pytest.raises(IntegrityError, match="its parent is not known"):
        check_integrity(pool)
