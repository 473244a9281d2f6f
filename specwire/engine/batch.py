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
from specwire.engine.cache.copies import SlotCopies
from specwire.engine.cache.kv_cache import PagePool, Run, SequenceCache, first_tokens
from specwire.errors import ContextLengthError, InvalidRequestError
from specwire.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence contributes to a forward pass.

    Attributes:
        cache: the sequence; the tokens follow those that it holds.
        token_ids: at least one; a list or an int64 array.
        num_rows: logits are wanted after each of the last `num_rows` tokens; 0 only fills the cache.
        tree: of the sequence, if it has one; a pass may contain some of its nodes, or none.
    """

    cache: SequenceCache
    token_ids: Sequence[int] | IntArray
    num_rows: int = 1
    tree: TokenTree | None = None


class Segment(NamedTuple):
    """One sequence's share of a packed row.

    Attributes:
        query_offset: its first token's index in the row.
        num_query: its tokens in the row, at least 1.
        cache_len: tokens in its cache, those of the row included.
        runs: the slots of its cache, in token order.
        pages: its page table.
        tree: the tree that tokens of the row are in, if any are.
    """

    query_offset: int
    num_query: int
    cache_len: int
    runs: Sequence[Run]
    pages: Sequence[int]
    tree: TokenTree | None = None

    @property
    def first_query(self) -> int:
        """Its first token in the row, as an index in the sequence."""
        return self.cache_len - self.num_query

    @property
    def num_common(self) -> int:
        """Tokens of its cache that come before all of its tokens in the row, and on the path of each."""
        return self.first_query if self.tree is None else min(self.first_query, self.tree.start)

    @property
    def positions(self) -> IntArray:
        """int64 [num_query], of its tokens in the row."""
        if self.tree is None:
            return np.arange(self.first_query, self.cache_len, dtype=np.int64)
        return self.tree.positions(self.first_query, self.cache_len)

    @property
    def words(self) -> IntArray:
        """int64 [num_query], the nodes of the tree that its tokens in the row see, see `TokenTree.words`."""
        if self.tree is None:
            return np.zeros(self.num_query, dtype=np.int64)
        return self.tree.words(self.first_query, self.cache_len)


class Batch(NamedTuple):
    """One packed row.

    Attributes:
        token_ids, positions, slots: int64 [num_tokens].
        segments: the sequences in row order; their `num_query` add up to num_tokens.
        rows: indices in the packed row whose logits are wanted.
        copies: slots to copy before any is written; None without any.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    segments: list[Segment]
    rows: list[int]
    copies: SlotCopies | None = None

    @property
    def has_trees(self) -> bool:
        """Whether any token is a node of a tree."""
        return any(segment.tree is not None for segment in self.segments)

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
                cache_len = segment.cache_len - left
                runs = first_tokens(segment.runs, cache_len) if left else segment.runs
                segments.append(
                    segment._replace(
                        query_offset=first - start, num_query=last - first, cache_len=cache_len, runs=runs
                    )
                )
        rows = [row - start for row in self.rows if start <= row < end]
        copies = self.copies if start == 0 else None
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

    @contextmanager
    def packed(self, feeds: Sequence[Feed]) -> Iterator[Batch]:
        """The batch of these feeds, at least one; an error in the body restores the lengths of all caches.

        Raises:
            InvalidRequestError: an empty feed, a token outside the vocabulary or after the last node of the
                tree, a sequence given twice.
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
            self._check_length(feed, feed.cache.length + token_ids.size)
        if len({id(feed.cache) for feed in feeds}) != len(feeds):
            raise InvalidRequestError("feeds", len(feeds), "name one sequence twice")

    def _check_length(self, feed: Feed, new_len: int) -> None:
        """Siblings share a position, so a tree may have more tokens than the context has positions."""
        tree, num_positions = feed.tree, new_len
        if tree is not None and new_len > tree.start:
            if new_len > tree.end:
                raise InvalidRequestError("token_ids", new_len, f"beyond the tree, which ends at {tree.end}")
            num_positions = int(tree.positions(tree.start, new_len).max()) + 1
        if self._context_len is not None and num_positions > self._context_len:
            raise ContextLengthError(
                "token_ids", num_positions, f"the model's context is {self._context_len} tokens"
            )

    def _pack(self, feeds: Sequence[Feed], tokens: Sequence[IntArray]) -> Batch:
        rows: list[int] = []
        slots, segments, end = [], [], 0
        for feed, token_ids in zip(feeds, tokens, strict=True):
            cache, num_query = feed.cache, token_ids.size
            slots.append(cache.append(num_query))
            tree = feed.tree if feed.tree is not None and cache.length > feed.tree.start else None
            segments.append(Segment(end, num_query, cache.length, cache.runs(), cache.pages, tree))
            end += num_query
            rows.extend(range(end - feed.num_rows, end))
        positions = np.concatenate([segment.positions for segment in segments])
        copies = self.pool.copies.take()
        return Batch(np.concatenate(tokens), positions, np.concatenate(slots), segments, rows, copies)
