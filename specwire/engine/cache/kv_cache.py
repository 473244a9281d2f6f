"""Bookkeeping of the paged KV cache: which sequences hold which pages. No torch, no device.

A *page* is `page_size` consecutive *slots*; a slot holds the keys and values of one token in every
layer. A sequence owns an ordered table of pages, token i of it lies in slot
`pages[i // page_size] * page_size + i % page_size`. Pages are counted by reference, so forks of a
sequence share what they have in common; the first write into a shared, partly filled page copies it. This
copy, and the moves of tokens that are kept (`keep`), are pending until the next pass.

The allocator keeps the pages of one sequence physically contiguous where it can, because attention
reads each contiguous run as a view:

    free interval at the start of the pool  [..........]   start at its first page
    free interval after another sequence    A[.........]   start in its middle: A keeps room to grow

A page is *held* by sequences, *free*, or *cached*: not held, but known by its tokens, so that a sequence
which begins with them can reuse it (`remember`, `reuse_prefix`; the names are in `prefix.py`). Cached pages
count as free. They are evicted least recently used first when no other page is left, and out of order where a
sequence can only grow contiguously into one.

Nothing here is thread-safe; one engine loop owns a pool.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specwire.engine.cache.copies import PendingCopies
from specwire.engine.cache.free_pages import FreeIntervals
from specwire.engine.cache.prefix import ROOT, PrefixIndex, page_digest
from specwire.errors import InternalError, InvalidRequestError, ResourceExhaustedError
from specwire.support import IntArray

# A cached page is evicted together with its cached neighbours, on each side up to one for this many pages of
# the pool. That frees contiguous room for several sequences to grow, which single pages would not.
_POOL_PAGES_PER_EVICTION = 64

MOST_NAMED_STATES = 64
"""States of recurrent layers that new sequences can begin with."""


class Run(NamedTuple):
    """Tokens of one sequence that lie in consecutive slots."""

    start_slot: int
    num_tokens: int


def first_tokens(runs: Iterable[Run], num_tokens: int) -> list[Run]:
    """The runs of the first `num_tokens` tokens."""
    some = []
    for run in runs:
        if num_tokens > 0:
            some.append(Run(run.start_slot, min(num_tokens, run.num_tokens)))
        num_tokens -= run.num_tokens
    return some


def runs_of(pages: Sequence[int], length: int, page_size: int) -> list[Run]:
    """Maximal runs of a sequence's tokens in consecutive slots, in token order.

    Args:
        pages: its page table.
        length: its tokens.
    """
    runs: list[Run] = []
    first, num_pages = 0, len(pages)
    while first < num_pages:
        end, ahead = first + 1, pages[first] - first
        while end < num_pages and pages[end] - end == ahead:
            end += 1
        runs.append(Run(pages[first] * page_size, min(end * page_size, length) - first * page_size))
        first = end
    return runs


class PagePool:
    """A fixed number of pages with reference counts.

    Args:
        num_pages: at least 1.
        page_size: slots in a page, at least 1.

    Attributes:
        keeps_states: sequences have states beside their pages, see `SequenceCache.states`.
        named_states: states at the ends of pages, by the pages' names, least recently used first.
        num_shared_pages: of the held pages, those that more than one sequence holds.
        copies: what the next pass of any sequence copies before it writes.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise InvalidRequestError(name, value, "must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.keeps_states = False
        self.named_states: dict[bytes, Any] = {}
        self._references = [0] * num_pages
        self._num_free = num_pages
        self.num_shared_pages = 0
        self.copies = PendingCopies()
        self._free = FreeIntervals(num_pages)
        self._index = PrefixIndex()

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds, cached ones included."""
        return self._num_free + self._index.num_idle

    @property
    def num_cached_pages(self) -> int:
        """Of the free pages, those whose content can be reused."""
        return self._index.num_idle

    @property
    def num_held_pages(self) -> int:
        """Pages that at least one sequence holds; a shared page counts once."""
        return self.num_pages - self.num_free_pages

    def new_sequence(self) -> SequenceCache:
        """An empty sequence; it holds no page yet."""
        return SequenceCache(self)

    def is_shared(self, page: int) -> bool:
        """True while more than one sequence holds the page."""
        return self._references[page] > 1

    def allocate(self, num_pages: int, after: int | None = None) -> list[int]:
        """Take pages with one reference each, contiguous where possible and following `after`.

        Raises:
            ResourceExhaustedError: fewer are free; nothing has been taken then.
        """
        if num_pages > self.num_free_pages:
            raise ResourceExhaustedError(
                f"the KV cache is full: {num_pages} pages of {self.page_size} tokens are needed, "
                f"{self.num_free_pages} of {self.num_pages} are free"
            )
        if num_pages > self._num_free:
            self._evict(num_pages)
        pages: list[int] = []
        while len(pages) < num_pages:
            interval = self._interval_for(num_pages - len(pages), after)
            pages.extend(interval)
            after = pages[-1]
        for page in pages:
            self._references[page] = 1
        self._num_free -= num_pages
        return pages

    def _interval_for(self, wanted: int, after: int | None) -> range:
        """Cut up to `wanted` pages out of one free interval."""
        if after is not None and after + 1 < self.num_pages and not self._references[after + 1]:
            self.forget(after + 1)  # if cached: staying contiguous is worth more than a cached page
        if after is not None and after + 1 in self._free.ends:
            start = begin = after + 1
            end = self._free.ends[start]
        else:
            start, end = self._free.largest()
            # No sequence ends before page 0; elsewhere leave half of the room to the one that ends there.
            begin = start if start == 0 else max(start, min((start + end) // 2, end - wanted))
        end = min(end, begin + wanted)
        self._free.take(start, begin, end)
        return range(begin, end)

    def _evict(self, num_free: int) -> None:
        """Evict cached pages, least recently used first, until `num_free` are free or none is cached."""
        while self._num_free < num_free and self._index.num_idle:
            page, reach = self._index.oldest(), self.num_pages // _POOL_PAGES_PER_EVICTION
            self.forget(page)
            above = range(page + 1, min(self.num_pages, page + reach + 1))
            below = range(page - 1, max(-1, page - reach - 1), -1)
            for pages in (above, below):
                for near in itertools.takewhile(lambda near: not self._references[near], pages):
                    self.forget(near)

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; a cached one is held from now on."""
        for page in pages:
            self._references[page] += 1
            self.num_shared_pages += self._references[page] == 2
            self._index.mark_used(page)

    def drop(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page; a page without any is free at once, or cached if it is known.

        Pages are evicted in the order in which they are dropped: drop the last page of a sequence first.
        """
        for page in pages:
            self._references[page] -= 1
            self.num_shared_pages -= self._references[page] == 1
            if self._references[page] == 0:
                if self._index.knows(page):
                    self._index.mark_idle(page)
                else:
                    self._free_page(page)

    def _free_page(self, page: int) -> None:
        self._free.give(page)
        self._num_free += 1

    def find(self, digest: bytes) -> int | None:
        """The page of this name, if it is known; `share` it to keep it."""
        return self._index.find(digest)

    def remember(self, root: bytes, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Make the complete pages at the start of a sequence known; `digests` names all, from `root`."""
        start = len(digests)
        while start > 0 and self._index.find(digests[start - 1]) is None:
            start -= 1  # pages before a known page are known, so this finds the first that is not
        for i in range(start, len(digests)):
            self._index.add(digests[i - 1] if i else root, digests[i], pages[i])

    def forget(self, page: int) -> None:
        """Make a page unknown, and all that follow it, because its content is about to change."""
        for idle in self._index.forget(page):
            self._free_page(idle)

    def forget_all(self) -> None:
        """Make all pages unknown and drop pending copies, because what the slots held is lost."""
        self.copies.forget()
        self.named_states.clear()
        for page in range(self.num_pages):
            self.forget(page)


@dataclass(eq=False, slots=True)
class SequenceCache:
    """The pages of one sequence and how many tokens they hold.

    Release it, or use it as a context manager: its pages are held until then.

    Attributes:
        root: parent of its first page's name; pages are shared among sequences with the same root. Set it
            while the sequence is empty.
        pool: whose pages it holds.
        pages: page table: page i holds tokens [i * page_size, (i + 1) * page_size). Not to be modified.
        writable_len: it may grow to this length as it is; beyond it the pool has to be asked.
        encoder_len: so many first tokens are the input of an encoder, which reads them all at once: they are
            held together or not at all. Set it while the sequence is empty.
        states: of recurrent layers, in order: the tokens that each is the state after, and the state, which
            forks share. The last one is after all tokens that are held.
        committed_len: a later truncation most likely keeps so many tokens, and a state after them is of use.
        adapter: number of the adapter that its tokens are run with, from 1; 0 for none. Set it while the
            sequence is empty, with a root that others do not have.
    """

    pool: PagePool
    pages: array[int] = field(default_factory=lambda: array("i"))
    writable_len: int = 0
    length: int = 0
    released: bool = False
    root: bytes = ROOT
    encoder_len: int = 0
    states: list[tuple[int, Any]] = field(default_factory=list)
    committed_len: int = 0
    adapter: int = 0
    _digests: list[bytes] = field(default_factory=list)
    """Names of the first complete pages, as far as they were needed."""

    def __enter__(self) -> SequenceCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def pages_needed(self, num_tokens: int) -> int:
        """Pages that `append(num_tokens)` would take from the pool, a copy on write included."""
        if self.length + num_tokens <= self.writable_len:
            return 0
        size = self.pool.page_size
        missing = -(-(self.length + num_tokens) // size) - len(self.pages)
        must_copy = num_tokens and self.length % size and self.pool.is_shared(self.pages[-1])
        return missing + 1 if must_copy else missing

    def append(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens and count them as held; a page copy may be pending.

        Raises:
            ResourceExhaustedError: the pool is full; nothing has changed then.
            InternalError: the sequence was released.
        """
        if not 0 <= num_tokens <= self.writable_len - self.length:
            self._take_pages(num_tokens)
        self.length += num_tokens

    def _take_pages(self, num_tokens: int) -> None:
        """Take pages from the pool for more tokens, and make the last page one that may be written."""
        if self.released:
            raise InternalError("append to a released sequence")
        if num_tokens < 0:
            raise InvalidRequestError("num_tokens", num_tokens, "must not be negative")
        pool, pages = self.pool, self.pages
        new_pages = pool.allocate(self.pages_needed(num_tokens), pages[-1] if pages else None)
        if num_tokens and self.length % pool.page_size:
            if pool.is_shared(pages[-1]):
                self._copy_on_write(new_pages)
            else:  # it may be known as complete: tokens that were rolled back are overwritten
                pool.forget(pages[-1])
        pages.extend(new_pages)
        if num_tokens:
            self.writable_len = len(pages) * pool.page_size

    def _copy_on_write(self, new_pages: list[int]) -> None:
        """Replace the shared last page by the first new one."""
        size = self.pool.page_size
        src_page, dst_page = self.pages[-1], new_pages.pop(0)
        self.pool.drop([src_page])
        self.pages[-1] = dst_page
        num_tokens = self.length % size
        src, dst = (range(page * size, page * size + num_tokens) for page in (src_page, dst_page))
        self.pool.copies.add(src, dst)

    def keep(self, start: int, kept: Sequence[int]) -> None:
        """Of the tokens from `start` on keep some, side by side: `start + kept[i]` becomes `start + i`.

        Pages that others read stay as they are: the tokens that would move into one, and all after them, are
        dropped.

        Args:
            kept: increasing, at least 0.

        Raises:
            InvalidRequestError: a token is not held.
        """
        size, num_kept = self.pool.page_size, len(kept)
        if kept and start + kept[-1] >= self.length:
            raise InvalidRequestError(
                "kept", kept, f"only {self.length - start} tokens are held from {start}"
            )
        in_place = next((i for i, index in enumerate(kept) if index != i), num_kept)
        if in_place < num_kept:
            touched = self.pages[(start + in_place) // size : (start + kept[-1]) // size + 1]
            if any(map(self.pool.is_shared, touched)):
                num_kept = in_place
            else:
                held = self.slots(start, self.length)
                moved = slice(in_place, num_kept)
                self.pool.copies.add(held[list(kept[moved])].tolist(), held[moved].tolist())
        self.truncate(start + num_kept)

    def slots(self, start: int, end: int) -> IntArray:
        """Slots of tokens [start, end), int64 [end - start]."""
        return slots_of([self], [start], [end - start])[1]

    def truncate(self, length: int) -> None:
        """Roll back: drop the tokens from `length` on. Pages that are no longer needed are free at once.

        A length within the input of an encoder drops all of them, and one between two states of recurrent
        layers those after the earlier one: callers read the length that is left.

        Raises:
            InvalidRequestError: `length` is negative or more than is held.
        """
        if not 0 <= length <= self.length:
            raise InvalidRequestError("length", length, f"must lie in [0, {self.length}]")
        if length < self.encoder_len:
            length = 0
        if self.pool.keeps_states:
            while self.states and self.states[-1][0] > length:
                self.states.pop()
            length = self.states[-1][0] if self.states else 0
        size, pages = self.pool.page_size, self.pages
        keep = -(-length // size)
        if len(pages) > keep:
            self.writable_len = 0  # the last page that is left may be shared or known
            while len(pages) > keep:
                self.pool.drop([pages.pop()])
        self.length = length
        if len(self._digests) > length // size:
            del self._digests[length // size :]

    @property
    def has_unnamed_page(self) -> bool:
        """Whether a complete page is there to be remembered."""
        return self.length // self.pool.page_size > len(self._digests)

    def remember(self, token_ids: Sequence[int]) -> None:
        """Make the complete pages known; their keys and values must have been computed.

        Args:
            token_ids: the first tokens of this sequence, each following the one before it; pages beyond them
                stay unknown.
        """
        num_complete = min(self.length, len(token_ids)) // self.pool.page_size
        if len(self._digests) < num_complete:
            self._digests.extend(self._names(token_ids, num_complete))
            self.pool.remember(self.root, self._digests, self.pages)
            self._name_states()
            if num_complete == len(self.pages):
                self.writable_len = 0  # once known, the last page must not be written

    def _name_states(self) -> None:
        """Make the states at the ends of known pages known, too."""
        named, size = self.pool.named_states, self.pool.page_size
        for length, state in self.states:
            if length % size == 0 and length <= len(self._digests) * size:
                named.pop(name := self._digests[length // size - 1], None)
                named[name] = state
        while len(named) > MOST_NAMED_STATES:
            del named[next(iter(named))]

    def reuse_prefix(self, token_ids: Sequence[int], max_tokens: int) -> int:
        """Share the known pages that `token_ids` begin with, instead of computing them; where layers are
        recurrent, those up to the last state that is known.

        Args:
            token_ids: the tokens that the sequence, which must be empty, is to hold.
            max_tokens: reuse at most this many tokens, in whole pages.

        Returns:
            The number of tokens reused; none if they are less than the input of an encoder.

        Raises:
            InternalError: the sequence is not empty, or was released.
        """
        if self.released or self.length:
            raise InternalError("only an empty sequence can reuse pages")
        for digest in self._names(token_ids, max_tokens // self.pool.page_size):
            page = self.pool.find(digest)
            if page is None:
                break
            self.pool.share([page])
            self.pages.append(page)
            self._digests.append(digest)
        size, named = self.pool.page_size, self.pool.named_states
        self.states = [
            ((i + 1) * size, named[name]) for i, name in enumerate(self._digests) if name in named
        ][-1:]
        self.length = len(self.pages) * size
        self.truncate(self.length)
        return self.length

    def _names(self, token_ids: Sequence[int], num_pages: int) -> Iterator[bytes]:
        """Digests of the pages up to `num_pages`, after those that are named already."""
        size, first = self.pool.page_size, len(self._digests)
        name = self._digests[-1] if first else self.root
        for start in range(first * size, num_pages * size, size):
            name = page_digest(name, token_ids[start : start + size])
            yield name

    def fork(self) -> SequenceCache:
        """A second sequence with the same tokens; shares all pages, copies nothing.

        Raises:
            InternalError: the sequence was released.
        """
        if self.released:
            raise InternalError("fork of a released sequence")
        twin = SequenceCache(self.pool)
        self.pool.share(self.pages)
        twin.pages = self.pages[:]
        twin._digests = self._digests.copy()
        twin.root, twin.encoder_len, twin.adapter = self.root, self.encoder_len, self.adapter
        twin.length = self.length
        twin.states, twin.committed_len = self.states[:], self.committed_len
        self.writable_len = 0
        return twin

    def release(self) -> None:
        """Drop all pages; may be called repeatedly."""
        self.truncate(0)
        self.released = True


def slots_of(
    sequences: Sequence[SequenceCache], starts: Sequence[int], num_tokens: Sequence[int]
) -> tuple[IntArray, IntArray]:
    """Tokens of several sequences, one sequence after another: from each `num_tokens` from its `start` on.

    Returns:
        Each token's index in its sequence, and its slot; int64 [sum of num_tokens].
    """
    shifts, lengths = [], []
    size = sequences[0].pool.page_size
    for sequence, start, num in zip(sequences, starts, num_tokens, strict=True):
        page = start // size
        if 0 < num <= (page + 1) * size - start:  # as in most rounds: one page
            shifts.append((sequence.pages[page] - page) * size)
            lengths.append(num)
        else:
            for page in range(start // size, -(-(start + num) // size)):
                shifts.append((sequence.pages[page] - page) * size)
                lengths.append(min(start + num, (page + 1) * size) - max(start, page * size))
    begins = [*map(operator.sub, starts, itertools.accumulate(num_tokens, initial=0))]
    index = np.arange(sum(num_tokens)) + np.repeat(np.array(begins, np.int64), num_tokens)
    return index, index + np.repeat(np.array(shifts, np.int64), lengths)
