"""Attention on a CPU one token at a time: bitwise independent of the rest of the pass.

The order in which kernels sum depends on the number of queries and on the runs that the keys are split into.
So each token is attended in a call of its own, and keys in several runs are copied into one first. Every
token of a pass costs as much as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specwire.engine.attention import views
from specwire.engine.batch import Segment
from specwire.engine.cache.kv_cache import Run
from specwire.engine.cache.layer_cache import LayerCache, Scoring


@dataclass
class TokenwiseBatch:
    """What attends in such a pass, as `PackedBatch`: a row of fixed length; the segments are its first
    tokens, and padding tokens share a slot that is never read."""

    slots: Tensor
    segments: Sequence[Segment]
    layers: dict[nn.Module, LayerCache]
    adapters: Tensor | None = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`; padding tokens get zeros."""
        layer = self.layers[module]
        layer.write(self.slots, key, value)
        num_kv_heads, value_dim = layer.values.shape[1:]
        num_heads, num_tokens, head_dim = query.shape[1:]
        grouped = query[0].transpose(0, 1).reshape(num_tokens, num_kv_heads, -1, head_dim)
        output = query.new_zeros(*grouped.shape[:3], value_dim)
        for segment in self.segments:
            memory, start = _in_one_run(layer, segment.runs)
            for i in range(segment.num_query):
                run = _seen(segment, i, start, scoring.sliding_window)
                row = slice(segment.query_offset + i, segment.query_offset + i + 1)
                output[row] = views.attend_run(grouped[row], memory, run, scoring)
        return output.reshape(1, num_tokens, num_heads, value_dim)


def _in_one_run(layer: LayerCache, runs: Sequence[Run]) -> tuple[LayerCache, int]:
    """A sequence's keys in one run, in place or in a copy, and the slot of the first key."""
    if len(runs) == 1:
        return layer, runs[0].start_slot
    parts = [slice(run.start_slot, run.start_slot + run.num_tokens) for run in runs]
    return LayerCache(*(torch.cat([of[part] for part in parts]) for of in (layer.keys, layer.values))), 0


def _seen(segment: Segment, index: int, start: int, window: int | None) -> Run:
    """The keys that a segment's token sees, in memory whose first slot is `start`."""
    num_keys = segment.cache_len - segment.num_query + index + 1
    first = 0 if window is None else max(0, num_keys - window)
    return Run(start + first, num_keys - first)
