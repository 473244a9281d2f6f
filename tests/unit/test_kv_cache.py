"""The page bookkeeping: exact accounting after any history, contiguity, copy on write, exhaustion."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from typing import Any

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


class History:
    """Sequences over a plain model of the memory.

    Attributes:
        finds: whether sequences begin with pages that are known by their tokens, of which there are few then.
        memory: by slot its token; where pages are found, all tokens up to its own.
        num_found: tokens that sequences began with.
    """

    def __init__(self, seed: int, *, finds: bool) -> None:
        self.rng, self.pool, self.finds, self.num_found = random.Random(seed), PagePool(24, 4), finds, 0
        self.memory: dict[int, Any] = {}
        self.live: list[tuple[SequenceCache, list[int]]] = []
        self.tokens = itertools.count()

    def contents(self, tokens: list[int]) -> list[Any]:
        return [tuple(tokens[: i + 1]) for i in range(len(tokens))] if self.finds else tokens

    def new_tokens(self, most: int) -> list[int]:
        return [next(self.tokens) if not self.finds else self.rng.randint(0, 1) for _ in range(most)]

    def step(self) -> None:
        """A random operation. Paths of trees are kept where contents depend on no token before."""
        rng, others = self.rng, ["fork", "release"] if self.finds else ["keep", "fork", "release"]
        action = rng.choice(["new", "append", "append", "append", "truncate", *others])
        if action == "new" or not self.live:
            sequence, tokens = self.pool.new_sequence(), self.new_tokens(12)
            length = sequence.reuse_prefix(tokens, 12) if self.finds else 0
            self.live.append((sequence, tokens[:length]))
            self.num_found += length
            return
        sequence, tokens = self.live[index := rng.randrange(len(self.live))]
        if action == "append":
            new = self.new_tokens(rng.randint(0, 9))
            with contextlib.suppress(ResourceExhaustedError):
                slots = appended(sequence, len(new))
                do_copies(self.pool, self.memory)
                tokens.extend(new)
                contents = self.contents(tokens)[len(tokens) - len(new) :]
                self.memory.update(zip(slots.tolist(), contents, strict=True))
                if self.finds:
                    sequence.remember(tokens)
        elif action == "truncate":
            sequence.truncate(length := rng.randint(0, sequence.length))
            del tokens[length:]
        elif action == "keep":
            start = rng.randint(0, sequence.length)
            kept = sorted(rng.sample(range(sequence.length - start), rng.randint(0, sequence.length - start)))
            sequence.keep(start, kept)
            assert sequence.length <= start + len(kept)
            tokens[start:] = [tokens[start + i] for i in kept][: sequence.length - start]
        elif action == "fork":
            self.live.append((sequence.fork(), tokens.copy()))
        else:
            sequence.release()
            self.live.pop(index)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("finds", [False, True], ids=["its own pages", "known ones"])
def test_random_histories(seed: int, finds: bool) -> None:
    """What was written to a slot is still there when it is read.

    Copies stay pending over any number of operations, until the next append.
    """
    history = History(seed, finds=finds)
    pool = history.pool
    for _ in range(600):
        history.step()
        check_integrity(pool)
        seen = after_copies(pool, history.memory)
        for sequence, tokens in history.live:
            slots = sequence.slots(0, sequence.length).tolist()
            assert [seen[slot] for slot in slots] == history.contents(tokens)
            assert [s + i for s, n in runs_in(sequence) for i in range(n)] == slots
    assert (history.num_found > 50) is finds
    for sequence, _ in history.live:
        sequence.release()
    assert (pool.num_held_pages, pool.num_free_pages) == (0, pool.num_pages)
    check_integrity(pool)


def test_integrity_names_a_lost_reference() -> None:
    sequence = sequence_of(5)
    sequence.pool.share(sequence.pages[:1])
    with pytest.raises(IntegrityError, match="page 0: 2 references, 1 tables"):
        check_integrity(sequence.pool)
    sequence = sequence_of(5)
    sequence.length = 4
    with pytest.raises(IntegrityError, match="length 4"):
        check_integrity(sequence.pool)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_empty_pools_are_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(InvalidRequestError):
        PagePool(num_pages, page_size)
