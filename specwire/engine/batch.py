"""The contents of a forward pass, and the bookkeeping that assembles them: no torch, no device.

The bookkeeping of the caches is done in one place, the `Packer`. A `Batch` is all that the computation needs,
whether it runs in the same process or in several that all receive the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specwire.core import IntArray
from specwire.engine.cache.kv_cache import PageCopy, PagePool, Run, SequenceCache
from specwire.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence contributes to a forward pass.

    Attributes:
        cache: the sequence; the tokens go to positions `cache.length` and on.
        token_ids: at least one; a list or an int64 array.
        num_rows: logits are wanted after each of the last `num_rows` tokens; 0 only fills the cache.
    """

    cache: SequenceCache
    token_ids: Sequence[int] | IntArray
    num_rows: int = 1


class Segment(NamedTuple):
    """One sequence's share of a packed row.

    Attributes:
        query_offset: its first token's index in the row.
        num_query: its tokens in the row, at least 1.
        cache_len: tokens in its cache, those of the row included.
        runs: the slots of its cache, in token order.
        pages: its page table.
    """

    query_offset: int
    num_query: int
    cache_len: int
    runs: Sequence[Run]
    pages: Sequence[int]


class Batch(NamedTuple):
    """One packed row.

    Attributes:
        token_ids, positions, slots: int64 [num_tokens].
        segments: the sequences in row order; their `num_query` add up to num_tokens.
        rows: indices in the packed row whose logits are wanted.
        copies: page copies, in this order, before any slot is written.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    segments: list[Segment]
    rows: list[int]
    copies: list[PageCopy]

    def split(self, max_tokens: int) -> list[Batch]:
        """The same work in batches of at most `max_tokens` tokens, to be run in this order."""
        starts = range(0, len(self.token_ids), max_tokens)
        return [self._between(start, start + max_tokens) for start in starts]

    def _between(self, start: int, end: int) -> Batch:
        some, segments = slice(start, end), []
        for segment in self.segments:
            first = max(segment.query_offset, start)
            last = min(segment.query_offset + segment.num_query, end)
            if first < last:
                left = segment.query_offset + segment.num_query - last
                segments.append(
                    segment._replace(
                        query_offset=first - start, num_query=last - first, cache_len=segment.cache_len - left
                    )
                )
        rows = [row - start for row in self.rows if start <= row < end]
        copies = self.copies if start == 0 else []
        return Batch(self.token_ids[some], self.positions[some], self.slots[some], segments, rows, copies)


class Packer:
    """Reserves slots for the tokens of sequences, and assembles batches.

    Args:
        pool: the pages.
        num_embeddings: exclusive upper bound of token ids.
        context_len: maximum tokens of one sequence; None for no limit.
    """

    def __init__(self, pool: PagePool, num_embeddings: int, context_len: int | None) -> None:
        self.pool = pool
        self._num_embeddings = num_embeddings
        self._context_len = context_len
        # Kept over failed passes: the page tables already refer to the copies.
        self._copies: list[PageCopy] = []

    @contextmanager
    def packed(self, feeds: Sequence[Feed]) -> Iterator[Batch]:
        """The batch of these feeds, at least one; an error in the body restores the lengths of all caches.

        Raises:
            InvalidRequestError: an empty feed, a token outside the vocabulary, a sequence given twice.
            ContextLengthError: a sequence would outgrow the model's context.
            ResourceExhaustedError: the cache is full.
        """
        tokens = [np.asarray(feed.token_ids, dtype=np.int64) for feed in feeds]
        self._check(feeds, tokens)
        lengths = [feed.cache.length for feed in feeds]
        try:
            yield self._pack(feeds, tokens)
        except BaseException:
            for feed, length in zip(feeds, lengths, strict=True):
                feed.cache.truncate(length)
            raise

    def forget_copies(self) -> None:
        """Drop pending copies, since the pages to copy are lost."""
        self._copies.clear()

    def _check(self, feeds: Sequence[Feed], tokens: Sequence[IntArray]) -> None:
        for feed, token_ids in zip(feeds, tokens, strict=True):
            if token_ids.ndim != 1 or token_ids.size == 0:
                raise InvalidRequestError("token_ids", feed.token_ids, "must be a non-empty list of tokens")
            if token_ids.min() < 0 or token_ids.max() >= self._num_embeddings:
                raise InvalidRequestError(
                    "token_ids", feed.token_ids, f"must lie in [0, {self._num_embeddings})"
                )
            if not 0 <= feed.num_rows <= token_ids.size:
                raise InvalidRequestError("num_rows", feed.num_rows, f"must lie in [0, {token_ids.size}]")
            if feed.cache.pool is not self.pool:
                raise InvalidRequestError("cache", feed.cache, "belongs to another runner")
            new_len = feed.cache.length + token_ids.size
            if self._context_len is not None and new_len > self._context_len:
                raise ContextLengthError(
                    "token_ids", new_len, f"the model's context is {self._context_len} tokens"
                )
        if len({id(feed.cache) for feed in feeds}) != len(feeds):
            raise InvalidRequestError("feeds", len(feeds), "name one sequence twice")

    def _pack(self, feeds: Sequence[Feed], tokens: Sequence[IntArray]) -> Batch:
        rows: list[int] = []
        slots, positions, segments, end = [], [], [], 0
        for feed, token_ids in zip(feeds, tokens, strict=True):
            cache, num_query = feed.cache, token_ids.size
            appended = cache.append(num_query)
            if appended.copy is not None:
                self._copies.append(appended.copy)
            slots.append(appended.slots)
            positions.append(np.arange(cache.length - num_query, cache.length))
            segments.append(Segment(end, num_query, cache.length, cache.runs(), cache.pages))
            end += num_query
            rows.extend(range(end - feed.num_rows, end))
        copies, self._copies = self._copies, []
        return Batch(
            np.concatenate(tokens), np.concatenate(positions), np.concatenate(slots), segments, rows, copies
        )
