"""The contents of a forward pass, and the bookkeeping that assembles them: no torch, no device.

The bookkeeping of the caches is done in one place, the `Packer`. A `Batch` is all that the computation needs,
whether it runs in the same process or in several that all receive the same batch.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specwire.engine.cache.copies import SlotCopies
from specwire.engine.cache.kv_cache import PagePool, Run, SequenceCache, runs_of, slots_of
from specwire.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from specwire.proposals.tree import TokenTree
from specwire.rule.columns import padded
from specwire.support import IntArray


class Feed(NamedTuple):
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


@dataclass(eq=False, slots=True)
class Feeds(Sequence[Feed]):
    """What the sequences of a pass contribute, see `Feed`, as columns; one by one they are made when they are
    read."""

    caches: list[SequenceCache] = field(default_factory=list)
    token_ids: list[Sequence[int] | IntArray] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    trees: list[TokenTree | None] = field(default_factory=list)

    @classmethod
    def of(cls, feeds: Sequence[Feed]) -> Feeds:
        """The columns of single ones; columns as they are."""
        if isinstance(feeds, Feeds):
            return feeds
        columns = cls()
        for feed in feeds:
            columns.add(feed)
        return columns

    def add(self, feed: Feed) -> None:
        cache, token_ids, num_rows, tree = feed
        self.caches.append(cache)
        self.token_ids.append(token_ids)
        self.num_rows.append(num_rows)
        self.trees.append(tree)

    @property
    def num_query(self) -> list[int]:
        """Tokens of each."""
        return [*map(len, self.token_ids)]

    @property
    def encoder_lens(self) -> list[int]:
        """First tokens of each sequence, which are the input of an encoder."""
        return [cache.encoder_len for cache in self.caches]

    def __len__(self) -> int:
        return len(self.caches)

    def __getitem__(self, index: Any) -> Any:
        return Feed(self.caches[index], self.token_ids[index], self.num_rows[index], self.trees[index])


class Segment(NamedTuple):
    """One sequence's share of a packed row.

    Attributes:
        query_offset: its first token's index in the row.
        num_query: its tokens in the row, at least 1.
        cache_len: tokens in its cache, those of the row included.
        runs: the slots of its cache, in token order.
        tree: the tree that tokens of the row are in, if any are.
        encoder_len: first tokens of the cache, which are the input of an encoder, and never in the row.
    """

    query_offset: int
    num_query: int
    cache_len: int
    runs: Sequence[Run]
    pages: Sequence[int]
    tree: TokenTree | None = None
    encoder_len: int = 0

    @property
    def rows(self) -> slice:
        """Of its tokens in the row."""
        return slice(self.query_offset, self.query_offset + self.num_query)

    @property
    def first_query(self) -> int:
        """Index of its first token of the row in the sequence."""
        return self.cache_len - self.num_query

    @property
    def num_common(self) -> int:
        """First tokens of its cache that are on the path of each of its tokens in the row."""
        return self.first_query if self.tree is None else min(self.first_query, self.tree.start)

    @property
    def positions(self) -> IntArray:
        """int64 [num_query], of its tokens in the row."""
        if self.tree is None:
            return np.arange(self.first_query, self.cache_len, dtype=np.int64)
        return self.tree.positions(self.first_query, self.cache_len)

    @property
    def words(self) -> IntArray:
        """int64 [num_query], what its tokens in the row see, see `TokenTree.words`."""
        if self.tree is None:
            return np.zeros(self.num_query, dtype=np.int64)
        return self.tree.words(self.first_query, self.cache_len)


@dataclass(eq=False)
class Segments(Sequence[Segment]):
    """The sequences of a packed row, in row order: as columns, and one by one for what attends to each alone.

    Attributes:
        query_offsets: [n + 1], each one's first token in the row, and the end of the last one.
        cache_lens, encoder_lens: [n], see `Segment`; the latter empty without an encoder.
        tables: [n], page tables.
        page_size: slots in a page.
        trees: of those that have tokens of a tree in the row, by index.
    """

    query_offsets: Sequence[int]
    cache_lens: Sequence[int]
    tables: Sequence[array[int]]
    page_size: int
    trees: Mapping[int, TokenTree]
    encoder_lens: Sequence[int] = ()

    @property
    def max_query(self) -> int:
        """Most tokens of one sequence in the row."""
        found: int = max(map(operator.sub, self.query_offsets[1:], self.query_offsets))
        return found

    def between(self, start: int, end: int) -> Segments:
        """Those with tokens [start, end) of the row, as a row of their own."""
        offsets = self.query_offsets
        kept = [i for i in range(len(self)) if offsets[i] < end and offsets[i + 1] > start]
        lasts = [min(end, offsets[i + 1]) for i in kept]
        return Segments(
            [0, *(last - start for last in lasts)],
            [self.cache_lens[i] - offsets[i + 1] + last for i, last in zip(kept, lasts, strict=True)],
            [self.tables[i] for i in kept],
            self.page_size,
            {place: self.trees[i] for place, i in enumerate(kept) if i in self.trees},
        )

    def words(self) -> IntArray:
        """int64 [num_tokens], the nodes that each token sees, see `Segment.words`."""
        words = np.zeros(self.query_offsets[-1], dtype=np.int64)
        for i in self.trees:
            words[self.query_offsets[i] : self.query_offsets[i + 1]] = self[i].words
        return words

    def page_table(self) -> npt.NDArray[np.int32]:
        """The page tables as rows, [n, most pages], filled up with page 0."""
        lengths = np.fromiter(map(len, self.tables), np.int64, len(self))
        return padded(np.frombuffer(bytearray().join(self.tables), np.int32), lengths, 0)

    @cached_property
    def _each(self) -> list[Segment]:
        columns = zip(self.query_offsets, self.query_offsets[1:], self.cache_lens, self.tables, strict=False)
        encoder_lens, found = self.encoder_lens or [0] * len(self), []
        for i, (start, end, length, pages) in enumerate(columns):
            runs = runs_of(pages, length, self.page_size)
            found.append(Segment(start, end - start, length, runs, pages, self.trees.get(i), encoder_lens[i]))
        return found

    def __len__(self) -> int:
        return len(self.cache_lens)

    def __getitem__(self, index: Any) -> Any:
        return self._each[index]


class EncoderInputs(NamedTuple):
    """Inputs of sequences that begin in a pass, which the encoder of an encoder-decoder reads.

    Attributes:
        token_ids: int64 [num_tokens], of one input after another.
        lens: tokens of each; empty without any.
        slots: int64 [num_tokens], where the decoder's keys and values of these tokens are written.
    """

    token_ids: IntArray
    lens: Sequence[int]
    slots: IntArray


class Batch(NamedTuple):
    """One packed row.

    Attributes:
        token_ids, positions, slots: int64 [num_tokens]; positions of an encoder-decoder are its decoder's.
        segments: the sequences in row order; their `num_query` add up to num_tokens.
        rows: int64, indices in the packed row whose logits are wanted.
        copies: slots to copy before any is written; None without any.
        inputs: of the encoder; None without one.
        caches: the sequences, where they keep states of recurrent layers; else none.
        adapters: int64 [num_tokens], of each token, see `SequenceCache`; None if no token has one.
    """

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    segments: Segments
    rows: IntArray
    copies: SlotCopies | None = None
    inputs: EncoderInputs | None = None
    caches: Sequence[SequenceCache] = ()
    adapters: IntArray | None = None

    def previous_slots(self) -> IntArray:
        """The slot of the token before each token, int64 [num_tokens]; anything before the first one."""
        segments, previous = self.segments, np.roll(self.slots, 1)
        size = segments.page_size

        def slot(pages: Sequence[int], index: int) -> int:
            return pages[index // size] * size + index % size

        offsets = segments.query_offsets
        columns = zip(offsets, offsets[1:], segments.cache_lens, segments.tables, strict=False)
        for i, (start, end, length, pages) in enumerate(columns):
            first, tree = length - (end - start), segments.trees.get(i)
            if first:
                previous[start] = slot(pages, first - 1)
            if tree is not None:
                for index in range(max(first, tree.start), length):
                    parent = tree.parents[index - tree.start]  # -1 is the token before the tree
                    previous[start + index - first] = slot(pages, tree.start + parent)
        return previous

    def split(self, max_tokens: int) -> list[Batch]:
        """The same work in batches of at most `max_tokens` tokens, to be run in this order."""
        starts = range(0, len(self.token_ids), max_tokens)
        return [self._between(start, start + max_tokens) for start in starts]

    def _between(self, start: int, end: int) -> Batch:
        some = slice(start, end)
        return Batch(
            self.token_ids[some],
            self.positions[some],
            self.slots[some],
            self.segments.between(start, end),
            self.rows[(self.rows >= start) & (self.rows < end)] - start,
            copies=self.copies if start == 0 else None,
            adapters=None if self.adapters is None else self.adapters[some],
        )


@dataclass(frozen=True)
class Packer:
    """Reserves slots for the tokens of sequences, and assembles batches.

    Attributes:
        num_embeddings: exclusive upper bound of token ids.
        context_len: maximum tokens of one sequence, without the input of an encoder; None for no limit.
        batch_invariant: refuse trees, whose tokens attend together.
    """

    pool: PagePool
    num_embeddings: int
    context_len: int | None
    batch_invariant: bool = False

    @contextmanager
    def packed(self, feeds: Sequence[Feed]) -> Iterator[Batch]:
        """The batch of these feeds, at least one; an error in the body restores the lengths of all caches.

        Raises:
            InvalidRequestError: an empty feed, a token outside the vocabulary or after the last node of the
                tree, a sequence given twice, one that ends within the input of its encoder.
            ContextLengthError: a sequence would outgrow the model's context.
            ResourceExhaustedError: the cache is full.
            UnsupportedError: a tree where rows are to be bitwise independent of others, or layers are
                recurrent.
        """
        feeds = Feeds.of(feeds)
        lengths = [cache.length for cache in feeds.caches]
        token_ids = self._checked(feeds, lengths)
        try:
            yield self._pack(feeds, lengths, token_ids)
        except BaseException:
            for cache, length in zip(feeds.caches, lengths, strict=True):
                cache.truncate(length)
            raise

    def _checked(self, feeds: Feeds, lengths: Sequence[int]) -> IntArray:
        """The tokens of all feeds, int64 [num_tokens], once they are found to be in order."""
        caches, num_query = feeds.caches, feeds.num_query
        if any(cache.pool is not self.pool for cache in caches):
            raise InvalidRequestError("cache", caches, "one belongs to another runner")
        if len(set(caches)) != len(caches):
            raise InvalidRequestError("feeds", len(feeds), "name one sequence twice")
        if min(num_query) == 0:
            raise InvalidRequestError("token_ids", [], "must be a non-empty list of tokens")
        token_ids = np.fromiter(chain.from_iterable(feeds.token_ids), np.int64, sum(num_query))
        if token_ids.min() < 0 or token_ids.max() >= self.num_embeddings:
            raise InvalidRequestError("token_ids", token_ids, f"must lie in [0, {self.num_embeddings})")
        num_own = num_query
        if any(feeds.encoder_lens):
            num_own = [*map(operator.sub, num_query, _num_read(feeds.encoder_lens, lengths))]
            if min(num_own) < 1:
                raise InvalidRequestError("token_ids", num_query, "must be over the input of an encoder")
        if min(feeds.num_rows) < 0 or any(map(operator.gt, feeds.num_rows, num_own)):
            raise InvalidRequestError("num_rows", feeds.num_rows, f"must lie in [0, {num_own}]")
        if any(feeds.trees):
            self._check_trees(feeds, lengths)
        return token_ids

    def _check_trees(self, feeds: Feeds, lengths: Sequence[int]) -> None:
        if self.batch_invariant or self.pool.keeps_states:
            what = "--batch-invariant" if self.batch_invariant else "a model with recurrent layers"
            raise UnsupportedError("tree", "given", f"{what} runs chains only")
        for tree, end in zip(feeds.trees, map(operator.add, lengths, feeds.num_query), strict=True):
            if tree is not None and end > tree.end:
                raise InvalidRequestError("token_ids", end, f"beyond the tree, which ends at {tree.end}")

    def _pack(self, feeds: Feeds, lengths: Sequence[int], token_ids: IntArray) -> Batch:
        caches, num_query, encoder_lens = feeds.caches, feeds.num_query, feeds.encoder_lens
        for cache, num in zip(caches, num_query, strict=True):
            cache.append(num)
        positions, slots = slots_of(caches, lengths, num_query)
        offsets, ends = [0, *accumulate(num_query)], [cache.length for cache in caches]
        trees = {i: tree for i, tree in enumerate(feeds.trees) if tree is not None and ends[i] > tree.start}
        for i, tree in trees.items():
            positions[offsets[i] : offsets[i + 1]] = tree.positions(lengths[i], ends[i])
        if any(encoder_lens):
            positions -= np.repeat(encoder_lens, num_query)
        # Siblings share a position, so a tree may have more tokens than the context has positions.
        if self.context_len is not None and (num := int(positions.max()) + 1) > self.context_len:
            raise ContextLengthError("token_ids", num, f"the model's context is {self.context_len} tokens")
        tables = [cache.pages for cache in caches]
        segments = Segments(offsets, ends, tables, self.pool.page_size, trees)
        rows = _rows(feeds.num_rows, offsets)
        batch = Batch(token_ids, positions, slots, segments, rows, self.pool.copies.take())
        adapters = [cache.adapter for cache in caches]
        if any(adapters):
            batch = batch._replace(adapters=np.repeat(np.array(adapters, np.int64), num_query))
        if self.pool.keeps_states:
            return batch._replace(caches=caches)
        return _without_inputs(batch, feeds, lengths) if any(encoder_lens) else batch


def _num_read(encoder_lens: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Tokens of each sequence that the encoder reads in this pass: all of its input, if it is empty."""
    return [0 if length else num for num, length in zip(encoder_lens, lengths, strict=True)]


def _without_inputs(batch: Batch, feeds: Feeds, lengths: Sequence[int]) -> Batch:
    """The decoder's part of a batch, with what the encoder reads, before position 0, apart; lengths are those
    before the pass."""
    segments = batch.segments
    num_read = _num_read(feeds.encoder_lens, lengths)
    own, read = batch.positions >= 0, batch.positions < 0
    offsets = [0, *accumulate(map(operator.sub, feeds.num_query, num_read))]
    lens, tables = segments.cache_lens, segments.tables
    return batch._replace(
        token_ids=batch.token_ids[own],
        positions=batch.positions[own],
        slots=batch.slots[own],
        segments=Segments(offsets, lens, tables, segments.page_size, segments.trees, feeds.encoder_lens),
        rows=_rows(feeds.num_rows, offsets),
        inputs=EncoderInputs(batch.token_ids[read], [num for num in num_read if num], batch.slots[read]),
    )


def _rows(num_rows: Sequence[int], offsets: Sequence[int]) -> IntArray:
    """Where logits are wanted: the last `num_rows` tokens of each feed, which ends at the next offset."""
    if sum(num_rows) == offsets[-1]:
        return np.arange(offsets[-1])
    firsts = np.array(offsets[1:]) - num_rows
    before = np.cumsum(num_rows) - num_rows
    return np.arange(sum(num_rows)) + np.repeat(firsts - before, num_rows)
