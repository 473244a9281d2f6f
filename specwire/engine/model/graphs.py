"""Steps padded to a few fixed sizes: for CUDA graphs, and for batch-invariant logits.

A step is padded to a *bucket*. Everything that changes from step to step is in one block of numbers, which is
written on the host and copied to the device at once; the model and its attention read it there.

    tokens    | a a a b b b b . |       . padding: it writes to a scratch page, and belongs to no segment
    segments  | a     | b     | |       unused ones are empty

Results for padding tokens are never read, and may be anything.

On CUDA a bucket is captured when it is used for the second time, up to a limit: a step is then one launch
instead of a thousand. If a capture fails (a model that waits for the device inside a pass), all run eagerly.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specwire.config.services import ModelServiceConfig
from specwire.engine.attention import dense
from specwire.engine.attention.varlen import BlockTables
from specwire.engine.batch import Batch, Segments
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.rule.captured import CudaReplay, EagerReplay, Replay
from specwire.support import IntArray

log = logging.getLogger(__name__)

MAX_GRAPHS = 96
_RECORD_AT = 2
TOKEN_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SEGMENT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUERY_SIZES = (1, 8, 64, 512)
_FEW_ROWS = 16
"""Prompts want one row of logits, whatever their length; there are two sizes, this one and all tokens."""
INVARIANT_TOKENS = 64
"""Tokens of every pass where a row must not depend on the others."""


class Bucket(NamedTuple):
    """The size of a padded step.

    Attributes:
        num_tokens: padding included.
        num_segments: sequences.
        max_query, num_pages: most tokens, and pages, of one sequence.
        has_trees: some sequences end in trees, whose attention copies the keys.
        has_few_rows: logits are wanted of `_FEW_ROWS` tokens at most.
        has_adapters: some tokens have an adapter, and all are run with adapters.
        has_previous: of each token the slot of the one before it is known.
    """

    num_tokens: int
    num_segments: int
    max_query: int
    num_pages: int
    has_trees: bool = False
    has_few_rows: bool = False
    has_adapters: bool = False
    has_previous: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens whose logits are computed."""
        return min(self.num_tokens, _FEW_ROWS) if self.has_few_rows else self.num_tokens


@dataclass(frozen=True)
class Buckets:
    """The set of sizes.

    Attributes:
        page_size: slots in a page.
        max_pages: of a sequence.
        gathers: attention copies the keys, so the size of the copies is bounded too.
        batch_invariant: all steps have one size, `INVARIANT_TOKENS`.
        has_previous: see `Bucket`.
    """

    page_size: int
    max_pages: int
    gathers: bool = False
    batch_invariant: bool = False
    has_previous: bool = False

    def fit(self, row: Batch) -> Bucket | None:
        """The smallest bucket that holds the row; None if it is too large for all."""
        has_adapters, segments = row.adapters is not None, row.segments
        if self.batch_invariant:
            return self.invariant._replace(has_adapters=has_adapters)
        num_tokens = _at_least(TOKEN_SIZES, len(row.token_ids))
        num_segments = _at_least(SEGMENT_SIZES, len(segments))
        query_size = _at_least(QUERY_SIZES, segments.max_query)
        if num_tokens is None or num_segments is None or query_size is None:
            return None
        most_pages, has_trees = max(map(len, segments.tables)), bool(segments.trees)
        num_pages = self._pages_for(most_pages, gathers=self.gathers or has_trees)
        has_few_rows = len(row.rows) <= _FEW_ROWS < num_tokens
        sizes = num_tokens, num_segments, min(query_size, num_tokens), num_pages
        bucket = Bucket(*sizes, has_trees, has_few_rows, has_adapters, self.has_previous)
        return bucket if self.allows(bucket) else None

    @property
    def invariant(self) -> Bucket:
        """The only bucket of batch-invariant steps."""
        size = INVARIANT_TOKENS
        return Bucket(size, size, size, self.max_pages)

    def single_stream(self) -> list[Bucket]:
        """The buckets of a single stream: prompts, verifying up to 15 draft tokens, and decoding."""
        if self.batch_invariant:
            return [self.invariant]
        found = []
        for num_tokens in (512, 384, 256, 192, 128, 96, 64, 32, 16, 8, 4, 2, 1):
            most_pages = -(-num_tokens // self.page_size)
            if most_pages <= self.max_pages:
                num_pages = self._pages_for(most_pages, gathers=self.gathers)
                query_size = min(num_tokens, _at_least(QUERY_SIZES, num_tokens) or num_tokens)
                bucket = Bucket(num_tokens, 1, query_size, num_pages, has_previous=self.has_previous)
                found.append(bucket._replace(has_few_rows=num_tokens > _FEW_ROWS))
        return [bucket for bucket in found if self.allows(bucket)]

    def allows(self, bucket: Bucket) -> bool:
        """Whether it is small enough, where attention copies keys."""
        max_keys = bucket.num_pages * self.page_size
        gathers = self.gathers or bucket.has_trees
        return not gathers or dense.fits(bucket.num_segments, bucket.max_query, max_keys)

    def _pages_for(self, num_pages: int, *, gathers: bool) -> int:
        """Wide page tables cost little in a kernel, but much if keys are copied: sizes grow by 8, or by 2."""
        size, factor = (1, 2) if gathers else (16, 8)
        while size < num_pages:
            size *= factor
        return min(size, max(self.max_pages, num_pages))


def _at_least(sizes: Sequence[int], wanted: int) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


class _Parts:
    """Named views of a step's block of numbers, int64 [size(bucket)], a tensor or an array."""

    def __init__(self, block: Any, bucket: Bucket) -> None:
        num_lines, num_segments = _num_lines(bucket), bucket.num_segments
        lines = block[: num_lines * bucket.num_tokens].reshape(num_lines, -1)
        self.token_ids, self.positions, self.slots = lines[:3]
        self.rows = lines[3][: bucket.num_rows]
        self.words = lines[4] if bucket.has_trees else None
        self.previous = lines[4 + bucket.has_trees] if bucket.has_previous else None
        self.adapters = lines[-1] if bucket.has_adapters else None
        int32: Any = torch.int32 if isinstance(block, Tensor) else np.int32
        tables = block[num_lines * bucket.num_tokens :].view(int32)
        ends = np.cumsum([num_segments + 1, num_segments, num_segments * bucket.num_pages]).tolist()
        self.query_offsets = tables[: ends[0]]
        self.cache_lens = tables[ends[0] : ends[1]]
        self.pages = tables[ends[1] : ends[2]].reshape(num_segments, bucket.num_pages)

    @staticmethod
    def size(bucket: Bucket) -> int:
        """Length of the block, in int64."""
        num_int32 = 1 + bucket.num_segments * (2 + bucket.num_pages)
        return _num_lines(bucket) * bucket.num_tokens + -(-num_int32 // 2)


def _num_lines(bucket: Bucket) -> int:
    """Numbers of each token: its id, position and slot, a row, the nodes that it sees, the slot before its
    own, and its adapter."""
    return 4 + bucket.has_trees + bucket.has_previous + bucket.has_adapters


_NOTHING: IntArray = np.empty(0, np.int64)
_PADDING = Batch(_NOTHING, _NOTHING, _NOTHING, Segments([0], [], [], 0, {}), _NOTHING)


class StepInputs:
    """The inputs of a step in one bucket, on the host and on the device; reused for every such step.

    Attributes:
        bucket: its size.
        on_device: the parts as the model reads them, at fixed addresses.
        scratch_slot: where padding tokens are written.
    """

    def __init__(self, bucket: Bucket, device: torch.device, scratch_slot: int) -> None:
        self.bucket = bucket
        self.scratch_slot = scratch_slot
        is_cuda, size = device.type == "cuda", _Parts.size(bucket)
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._on_host, self.on_device = _Parts(self._host.numpy(), bucket), _Parts(self._device, bucket)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def fill(self, row: Batch = _PADDING) -> None:
        """Write a row, or only padding, and start the copy to the device without waiting for it."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still read the block
        self._write(row)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _write(self, row: Batch) -> None:
        parts, segments, num = self._on_host, row.segments, len(row.segments)
        _fill(parts.token_ids, row.token_ids, 0)
        _fill(parts.positions, row.positions, 0)
        _fill(parts.slots, row.slots, self.scratch_slot)
        _fill(parts.rows, row.rows, 0)
        if parts.words is not None:
            _fill(parts.words, segments.words(), 0)
        if parts.previous is not None:
            _fill(parts.previous, row.previous_slots(), self.scratch_slot)
        if parts.adapters is not None:
            _fill(parts.adapters, row.adapters, 0)
        _fill(parts.query_offsets, segments.query_offsets, len(row.token_ids))
        _fill(parts.cache_lens, segments.cache_lens, 1)
        table = segments.page_table()
        parts.pages[:num, : table.shape[1]] = table


def _fill(part: Any, numbers: Any, padding: int) -> None:
    part[: len(numbers)], part[len(numbers) :] = numbers, padding


class TabledBatch:
    """What attends in a padded step, as `PackedBatch`; everything about the sequences is on the device."""

    def __init__(self, inputs: StepInputs, layers: dict[nn.Module, LayerCache], page_size: int) -> None:
        bucket, parts = inputs.bucket, inputs.on_device
        self._slots, self._layers, self.adapters = parts.slots, layers, parts.adapters
        max_keys = bucket.num_pages * page_size
        lens = parts.query_offsets, parts.cache_lens
        tables = BlockTables(*lens, parts.pages, bucket.max_query, max_keys)
        self._attention = dense.TableAttention(tables, lambda: parts.positions, page_size, parts.words)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        layer = self._layers[module]
        layer.write(self._slots, key, value)
        variant = self._attention.variant(layer, query, scoring)
        return self._attention.attend(variant, layer, query, scoring)


class PaddedSteps:
    """Runs packed rows in buckets.

    Args:
        run_model: on the inputs of a bucket; returns logits [num_tokens, vocab_size], the wanted rows first.
        replay: how buckets are captured.
        scratch_slot: slot that padding tokens write to.

    Attributes:
        recorded: captured steps.
    """

    def __init__(
        self,
        run_model: Callable[[StepInputs], Tensor],
        buckets: Buckets,
        replay: Replay,
        device: torch.device,
        scratch_slot: int,
    ) -> None:
        self.buckets, self.run_model = buckets, run_model
        self._replay: Replay | None = replay
        self._device = device
        self._scratch_slot = scratch_slot
        self._inputs = functools.cache(self.new_inputs)  # the same memory for all steps of a size
        self.recorded: dict[Bucket, Callable[[], Tensor]] = {}
        self._num_used: Counter[Bucket] = Counter()

    def run(self, row: Batch) -> Tensor | None:
        """Logits float32 [len(row.rows), vocab_size], in new memory; None if the row fits no bucket."""
        bucket = self.buckets.fit(row)
        if bucket is None:
            return None
        self._inputs(bucket).fill(row)
        self._num_used[bucket] += 1
        if self._num_used[bucket] == _RECORD_AT:
            self._record(bucket)
        replay = self.recorded.get(bucket)
        logits = replay() if replay else self.run_model(self._inputs(bucket))
        return logits[: len(row.rows)].to(torch.float32, copy=True)

    def warm(self) -> None:
        """Capture the buckets of a single stream, so that its first rounds need not wait for that."""
        for bucket in self.buckets.single_stream():
            self._inputs(bucket).fill()
            self._num_used[bucket] = _RECORD_AT
            self._record(bucket)

    def stop_replaying(self) -> None:
        """Run padded steps eagerly from now on."""
        self._replay = None
        self.recorded.clear()

    def new_inputs(self, bucket: Bucket) -> StepInputs:
        return StepInputs(bucket, self._device, self._scratch_slot)

    def _record(self, bucket: Bucket) -> None:
        """Running a step more than once is harmless: it writes the same keys to the same slots."""
        if self._replay is None or bucket in self.recorded or len(self.recorded) >= MAX_GRAPHS:
            return
        inputs = self._inputs(bucket)
        try:
            self.recorded[bucket] = self._replay.capture(lambda: self.run_model(inputs))
        except Exception as error:
            log.warning("steps run without CUDA graphs: %s", str(error).partition("\n")[0])
            self._replay = None


def make_replay(config: ModelServiceConfig, device: torch.device) -> Replay | None:
    """How passes of a few fixed sizes are repeated; None to run each pass as it is."""
    if device.type != "cuda":
        return None
    if config.cuda_graphs:
        return CudaReplay()
    return EagerReplay() if config.batch_invariant else None
