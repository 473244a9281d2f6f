"""Steps in a few fixed sizes: what a CUDA graph can repeat, and what computes a row the same in any company.

A step is filled up to a *bucket*. Everything that changes from step to step lies in one block of numbers
that is written on the host and copied to the device at once; the model and its attention read it there.

    tokens    | a a a b b b b . |       . fills up: it writes into a scratch page, and no sequence claims it
    segments  | a     | b     | |       unused ones are empty

What is computed for the tokens that fill up is never read, and may be anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specwire.engine.attention import dense, varlen
from specwire.engine.attention.varlen import BlockTables
from specwire.engine.batch import Batch, Segment
from specwire.engine.cache.layer_cache import LayerCache, Scoring

TOKEN_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SEGMENT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUERY_SIZES = (1, 8, 64)
INVARIANT_TOKENS = 64
"""Tokens of every pass where a row must not depend on its company."""


class Bucket(NamedTuple):
    """The size of a padded step.

    Attributes:
        num_tokens: real ones and those that fill up.
        num_segments: sequences.
        max_query: most tokens of one sequence.
        num_pages: most pages of one sequence.
    """

    num_tokens: int
    num_segments: int
    max_query: int
    num_pages: int


@dataclass(frozen=True)
class Buckets:
    """Which sizes there are.

    Attributes:
        page_size: slots in a page.
        max_pages: most pages that a sequence can have.
        max_tokens: larger steps are not padded.
        gathers: attention copies the keys, so what it would copy is bounded too.
        batch_invariant: all steps have one size, `INVARIANT_TOKENS`.
    """

    page_size: int
    max_pages: int
    max_tokens: int = TOKEN_SIZES[-1]
    gathers: bool = False
    batch_invariant: bool = False

    def fit(self, row: Batch) -> Bucket | None:
        """The smallest bucket that holds the row; None where it is too large for any."""
        if self.batch_invariant:
            return self.invariant
        max_query = max(segment.num_query for segment in row.segments)
        num_tokens = _at_least(TOKEN_SIZES, len(row.token_ids))
        num_segments = _at_least(SEGMENT_SIZES, len(row.segments))
        query_size = _at_least(QUERY_SIZES, max_query)
        if num_tokens is None or num_tokens > self.max_tokens or num_segments is None or query_size is None:
            return None
        num_pages = self._pages_for(max(len(segment.pages) for segment in row.segments))
        bucket = Bucket(num_tokens, num_segments, min(query_size, num_tokens), num_pages)
        return bucket if self._allows(bucket) else None

    @property
    def invariant(self) -> Bucket:
        """The only size where steps must all be alike."""
        size = INVARIANT_TOKENS
        return Bucket(size, size, size, self.max_pages)

    def usual(self) -> list[Bucket]:
        """What one stream needs: decoding, and verifying up to 15 draft tokens."""
        if self.batch_invariant:
            return [self.invariant]
        num_pages = self._pages_for(1)
        return [
            Bucket(num_tokens, 1, min(num_tokens, max_query), num_pages)
            for num_tokens, max_query in ((16, 64), (8, 8), (4, 8), (2, 8), (1, 1))
        ]

    def allows_invariance(self) -> bool:
        """Whether the one size is small enough for an attention that copies."""
        return self._allows(self.invariant)

    def _allows(self, bucket: Bucket) -> bool:
        max_keys = bucket.num_pages * self.page_size
        return not self.gathers or dense.fits(bucket.num_segments, bucket.max_query, max_keys)

    def _pages_for(self, num_pages: int) -> int:
        """A kernel does not mind a wide table, copies of keys do: sizes grow by 8, or by 2."""
        size, factor = (1, 2) if self.gathers else (16, 8)
        while size < num_pages:
            size *= factor
        return min(size, max(self.max_pages, num_pages))


def _at_least(sizes: Sequence[int], wanted: int) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


class _Parts:
    """Names for the parts of a step's block of numbers, int64 [size(bucket)]."""

    def __init__(self, block: Tensor, bucket: Bucket) -> None:
        num_tokens, num_segments = bucket.num_tokens, bucket.num_segments
        self.token_ids, self.positions, self.slots, self.rows = block[: 4 * num_tokens].view(4, -1)
        tables = block[4 * num_tokens :].view(torch.int32)
        ends = np.cumsum([num_segments + 1, num_segments, num_segments * bucket.num_pages]).tolist()
        self.query_offsets = tables[: ends[0]]
        self.cache_lens = tables[ends[0] : ends[1]]
        self.pages = tables[ends[1] : ends[2]].view(num_segments, bucket.num_pages)

    @staticmethod
    def size(bucket: Bucket) -> int:
        """Of the block, in int64."""
        num_int32 = 1 + bucket.num_segments * (2 + bucket.num_pages)
        return 4 * bucket.num_tokens + -(-num_int32 // 2)


class StepInputs:
    """The numbers of a step in one bucket, on the host and on the device; used again for every such step.

    Attributes:
        bucket: its size.
        on_device: the parts as the model reads them; the memory never moves.
    """

    def __init__(self, bucket: Bucket, device: torch.device, scratch_slot: int) -> None:
        self.bucket = bucket
        self._scratch_slot = scratch_slot
        is_cuda, size = device.type == "cuda", _Parts.size(bucket)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._on_host = _Parts(self._host, bucket)
        self.on_device = _Parts(self._device, bucket)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def fill(self, row: Batch | None) -> None:
        """Write a row, or none, and start the copy; the host does not wait for it."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before must have read the block
        num_tokens = self._fill_tokens(row)
        self._fill_segments(row.segments if row else (), num_tokens)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _fill_tokens(self, row: Batch | None) -> int:
        host, num_tokens = self._on_host, len(row.token_ids) if row else 0
        for part, filling in (
            (host.token_ids, 0),
            (host.positions, 0),
            (host.slots, self._scratch_slot),
            (host.rows, 0),
        ):
            part.numpy()[:] = filling
        if row is not None:
            host.token_ids.numpy()[:num_tokens] = row.token_ids
            host.positions.numpy()[:num_tokens] = row.positions
            host.slots.numpy()[:num_tokens] = row.slots
            host.rows.numpy()[: len(row.rows)] = row.rows
        return num_tokens

    def _fill_segments(self, segments: Sequence[Segment], num_tokens: int) -> None:
        host, num = self._on_host, len(segments)
        offsets, cache_lens, pages = (
            part.numpy() for part in (host.query_offsets, host.cache_lens, host.pages)
        )
        offsets[0] = 0
        offsets[1 : num + 1] = [segment.query_offset + segment.num_query for segment in segments]
        offsets[num + 1 :] = num_tokens
        cache_lens[:num] = [segment.cache_len for segment in segments]
        cache_lens[num:] = 1
        for line, segment in zip(pages, segments, strict=False):
            line[: len(segment.pages)] = segment.pages


@dataclass
class TabledBatch:
    """What travels as `packed=` in a padded step: all it knows of the sequences lies on the device.

    Attributes:
        inputs: the step's numbers.
        layers: the caches by attention module.
        page_size: slots in a page.
    """

    inputs: StepInputs
    layers: dict[nn.Module, LayerCache]
    page_size: int
    _varlen: varlen.VarlenStep | None = field(init=False, default=None)
    _dense: dense.DenseStep | None = field(init=False, default=None)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`."""
        layer = self.layers[module]
        layer.write(self.inputs.on_device.slots, key, value)
        way = varlen.find_way(layer, self.page_size, query.shape[1], scoring)
        if way is not None:
            if self._varlen is None:
                self._varlen = varlen.VarlenStep(self._tables(), self.page_size)
            return self._varlen.attend(way, layer, query, scoring)
        if self._dense is None:
            self._dense = dense.DenseStep(self._tables(), self.inputs.on_device.positions, self.page_size)
        return self._dense.attend(layer, query, scoring)

    def _tables(self) -> BlockTables:
        bucket, parts = self.inputs.bucket, self.inputs.on_device
        max_keys = bucket.num_pages * self.page_size
        return BlockTables(parts.query_offsets, parts.cache_lens, parts.pages, bucket.max_query, max_keys)
