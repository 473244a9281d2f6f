"""Attention on a CPU one token at a time: bitwise independent of the rest of the pass.

The order in which kernels sum depends on the number of queries and on the runs that the keys are split into.
So each token is attended in a call of its own, and keys in several runs are copied into one first. Every
token of a pass costs as much as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specwire.engine.attention import views
from specwire.engine.attention.paged import PackedBatch
from specwire.engine.batch import Batch
from specwire.engine.cache.kv_cache import Run
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.support import IntArray

TOKENWISE_TOKENS = 16
"""Tokens of every such pass: a round of one stream is one pass."""


def padded(batch: Batch, scratch_slot: int) -> Batch:
    """The batch as a row of fixed length; padding tokens share a slot that is never read."""

    def filled(numbers: IntArray, filling: int) -> IntArray:
        return np.concatenate([numbers, np.full(TOKENWISE_TOKENS - len(numbers), filling, np.int64)])

    return batch._replace(
        token_ids=filled(batch.token_ids, 0),
        positions=filled(batch.positions, 0),
        slots=filled(batch.slots, scratch_slot),
        rows=filled(batch.rows, 0),
        adapters=None if batch.adapters is None else filled(batch.adapters, 0),
    )


@dataclass
class TokenwiseBatch(PackedBatch):
    """What attends in such a pass; the segments are the first tokens of the row."""

    def read(self, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
        """See `PackedBatch`; padding tokens get zeros."""
        num_kv_heads, value_dim = layer.values.shape[1:]
        num_tokens, num_heads, head_dim = query.shape
        grouped = query.reshape(num_tokens, num_kv_heads, -1, head_dim)
        output, window = query.new_zeros(*grouped.shape[:3], value_dim), scoring.sliding_window
        attend = views.attending(layer, scoring)
        for segment in self.segments:
            memory, start = _in_one_run(layer, segment.runs)
            for row in range(segment.rows.start, segment.rows.stop):
                end = segment.first_query + row - segment.query_offset + 1  # after its own key
                first = 0 if window is None else max(0, end - window)
                read = views.Read(1, Run(start + first, end - first))
                output[row] = attend(grouped[row][None], memory, read, scoring)[0]
        return output.reshape(num_tokens, num_heads, value_dim)


def _in_one_run(layer: LayerCache, runs: Sequence[Run]) -> tuple[LayerCache, int]:
    """A sequence's keys in one run, in place or in a copy, and the slot of the first key."""
    if len(runs) == 1:
        return layer, runs[0].start_slot
    parts = [slice(run.start_slot, run.start_slot + run.num_tokens) for run in runs]
    return LayerCache(*(torch.cat([of[part] for part in parts]) for of in (layer.keys, layer.values))), 0
