"""The page bookkeeping: exact accounting after any history, contiguity, copy on write, exhaustion."""

from __future__ import annotations

import contextlib
import random
import time

import numpy as np
import pytest

from specwire.engine.cache.kv_cache import PagePool, Run, SequenceCache
from specwire.errors import InternalError, InvalidRequestError, ResourceExhaustedError
from specwire.support import IntArray
from tests.support.integrity import IntegrityError, check_integrity, open_sequences
from tests.support.slot_memory import after_copies, do_copies, runs_in


def sequence_of(num_tokens: int, num_pages: int = 8) -> SequenceCache:
    """In a pool of its own, of pages of 4 tokens."""
    sequence = PagePool(num_pages, 4).new_sequence()
    sequence.append(num_tokens)
    return sequence


def appended(sequence: SequenceCache, num_tokens: int) -> IntArray:
    """The slots of the new tokens."""
    sequence.append(num_tokens)
    return sequence.slots(sequence.length - num_tokens, sequence.length)


def test_slots_follow_the_page_table() -> None:
    pool = PagePool(8, 4)
    sequence = pool.new_sequence()
    first, second = appended(sequence, 3), appended(sequence, 6)
    assert first.dtype == np.int64
    assert [*first, *second] == list(range(9))
    assert sequence.length == 9
    assert len(sequence.pages) == pool.num_held_pages == 3
    assert runs_in(sequence) == [Run(0, 9)]
    assert sequence.slots(2, 5).tolist() == [2, 3, 4]


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_refuses_lengths_that_are_not_held(length: int) -> None:
    sequence = sequence_of(3)
    with pytest.raises(InvalidRequestError):
        sequence.truncate(length)
    assert sequence.length == 3


def test_exhaustion_changes_nothing() -> None:
    pool = PagePool(4, 4)
    one, two = pool.new_sequence(), pool.new_sequence()
    one.append(6)
    two.append(5)
    with pytest.raises(ResourceExhaustedError, match="full"):
        one.append(3)
    assert (one.length, len(one.pages), pool.num_free_pages) == (6, 2, 0)
    check_integrity(pool)
    one.append(2)  # what is left of its own page
    two.release()
    one.append(3)
    check_integrity(pool)


def test_fork_shares_until_the_first_write() -> None:
    parent = sequence_of(6)
    pool, child = parent.pool, parent.fork()
    assert pool.num_held_pages == 2
    assert child.pages_needed(1) == 1
    shared_page = parent.pages[1]
    slots, copies = appended(child, 1), pool.copies.take()
    assert copies is not None
    assert copies.src.tolist() == [shared_page * 4, shared_page * 4 + 1]
    assert copies.dst.tolist() == [child.pages[1] * 4, child.pages[1] * 4 + 1]
    assert child.pages[0] == parent.pages[0]
    assert child.pages[1] != shared_page
    assert slots.tolist() == [child.pages[1] * 4 + 2]
    parent.append(1)
    assert pool.copies.take() is None, "the last holder writes in place"
    check_integrity(pool)


def test_full_pages_are_never_copied() -> None:
    parent = sequence_of(8)
    child = parent.fork()
    child.append(1)
    assert parent.pool.copies.take() is None
    assert parent.pages == child.pages[:2]


def test_copy_on_write_that_does_not_fit_changes_nothing() -> None:
    parent = sequence_of(2, num_pages=1)
    pool, child = parent.pool, parent.fork()
    with pytest.raises(ResourceExhaustedError):
        child.append(1)
    assert (child.length, child.pages) == (2, parent.pages)
    check_integrity(pool)
    parent.release()
    child.append(1)
    assert pool.copies.take() is None


def test_release_is_idempotent_and_final() -> None:
    pool = PagePool(4, 4)
    with pool.new_sequence() as sequence:
        sequence.append(5)
    sequence.release()
    assert (pool.num_held_pages, open_sequences(pool)) == (0, [])
    for use in (lambda: sequence.append(1), sequence.fork):
        with pytest.raises(InternalError):
            use()
    check_integrity(pool)


@pytest.mark.parametrize("num_sequences", [1, 8, 64])
def test_sequences_that_grow_together_stay_contiguous(num_sequences: int) -> None:
    pool = PagePool(64 * 16, 16)
    sequences = [pool.new_sequence() for _ in range(num_sequences)]
    for _ in range(200):
        for sequence in sequences:
            sequence.append(1)
    assert {len(runs_in(sequence)) for sequence in sequences} == {1}
    check_integrity(pool)


def test_few_runs_in_a_long_lived_pool() -> None:
    """Sequences of mixed lengths come and go at 70 % use; the mean number of runs stays small."""
    rng, pool, live, runs = random.Random(0), PagePool(1024, 16), [], []
    for _ in range(600):
        sequence = pool.new_sequence()
        sequence.append(rng.randint(16, 400))
        live.append(sequence)
        for one in live:
            one.append(8)
        while pool.num_held_pages > 0.7 * pool.num_pages:
            done = live.pop(rng.randrange(len(live)))
            runs.append(len(runs_in(done)))
            done.release()
    check_integrity(pool)
    assert np.mean(runs) < 2.5


def test_a_large_pool_is_cheap() -> None:
    pool = PagePool(100_000, 16)
    sequences = [pool.new_sequence() for _ in range(64)]
    started = time.perf_counter()
    for _ in range(50):
        for sequence in sequences:
            sequence.append(16)
    mean_us = (time.perf_counter() - started) / (50 * 64) * 1e6
    assert mean_us < 500, f"{mean_us:.0f} µs an append, some 10 µs on an idle machine"


def test_tokens_that_are_kept_move_together() -> None:
    sequence = sequence_of(11)
    pool, slots = sequence.pool, sequence.slots(0, 11).tolist()
    sequence.keep(2, [0, 1, 4, 8])
    copies = pool.copies.take()
    assert copies is not None
    assert (copies.src.tolist(), copies.dst.tolist()) == ([slots[6], slots[10]], [slots[4], slots[5]])
    assert (sequence.length, pool.num_held_pages) == (6, 2)
    check_integrity(pool)
    with pytest.raises(InvalidRequestError, match="only 4 tokens are held from 2"):
        sequence.keep(2, [0, 4])


def test_a_lost_device_has_nothing_to_copy() -> None:
    sequence = sequence_of(6)
    sequence.keep(2, [3])
    sequence.truncate(0)
    sequence.pool.forget_all()
    assert sequence.pool.copies.take() is None


@pytest.mark.parametrize(("kept", "num_left"), [([0, 1, 4], 4), ([1, 2], 2), ([0, 1, 2, 3], 6), ([], 2)])
def test_nothing_moves_into_a_page_that_others_read(kept: list[int], num_left: int) -> None:
    sequence = sequence_of(11)
    with sequence.fork():
        sequence.keep(2, kept)
        assert (sequence.length, sequence.pool.copies.take()) == (num_left, None)
        check_integrity(sequence.pool)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(seed: int) -> None:
    """The cache against a plain model of it: what was written to a slot is still there when it is read.

    Copies stay pending over any number of operations, until the next append.
    """
    rng, pool = random.Random(seed), PagePool(24, 4)
    memory: dict[int, int] = {}
    live: list[tuple[SequenceCache, list[int]]] = []
    for step in range(1500):
        _random_operation(rng, pool, live, memory, step)
        check_integrity(pool)
        seen = after_copies(pool, memory)
        for sequence, tokens in live:
            assert [seen[slot] for slot in sequence.slots(0, sequence.length)] == tokens
            spelled = [s + i for s, n in runs_in(sequence) for i in range(n)]
            assert spelled == sequence.slots(0, sequence.length).tolist()
    for sequence, _ in live:
        sequence.release()
    assert pool.num_free_pages == pool.num_pages
    check_integrity(pool)


def _random_operation(
    rng: random.Random,
    pool: PagePool,
    live: list[tuple[SequenceCache, list[int]]],
    memory: dict[int, int],
    step: int,
) -> None:
    action = rng.choice(["new", "append", "append", "append", "truncate", "keep", "fork", "release"])
    if action == "new" or not live:
        live.append((pool.new_sequence(), []))
        return
    index = rng.randrange(len(live))
    sequence, tokens = live[index]
    if action == "append":
        new = [step * 100 + i for i in range(rng.randint(0, 9))]
        with contextlib.suppress(ResourceExhaustedError):
            slots = appended(sequence, len(new))
            do_copies(pool, memory)
            memory.update(zip(slots.tolist(), new, strict=True))
            tokens.extend(new)
    elif action == "truncate":
        length = rng.randint(0, sequence.length)
        sequence.truncate(length)
        del tokens[length:]
    elif action == "keep":
        start = rng.randint(0, sequence.length)
        kept = sorted(rng.sample(range(sequence.length - start), rng.randint(0, sequence.length - start)))
        sequence.keep(start, kept)
        assert sequence.length <= start + len(kept)
        tokens[start:] = [tokens[start + i] for i in kept][: sequence.length - start]
    elif action == "fork":
        live.append((sequence.fork(), tokens.copy()))
    else:
        sequence.release()
        live.pop(index)


def test_integrity_names_a_lost_reference() -> None:
    sequence = sequence_of(5)
    sequence.pool.share(sequence.pages[:1])
    with pytest.raises(IntegrityError, match="page 0: 2 references, 1 tables"):
        check_integrity(sequence.pool)


def test_integrity_names_a_wrong_length() -> None:
    sequence = sequence_of(5)
    sequence.length = 4
    with pytest.raises(IntegrityError, match="length 4"):
        check_integrity(sequence.pool)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_empty_pools_are_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(InvalidRequestError):
        PagePool(num_pages, page_size)
