"""Attention through torch's paged CUDA kernel, where torch has it: pages are found by a block table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from specwire.engine.layer_cache import LayerCache, Scoring, Segment

# FlashAttention-2, which torch carries, reads pages in tiles of this many tokens.
_PAGE_TILE = 256


class BlockTables(NamedTuple):
    """What a paged kernel wants to know; all int32 on the device.

    Attributes:
        query_offsets: [num_segments + 1].
        cache_lens: [num_segments].
        pages: [num_segments, most pages], padded with 0.
        max_query, max_keys: the largest of each.
    """

    query_offsets: Tensor
    cache_lens: Tensor
    pages: Tensor
    max_query: int
    max_keys: int


def block_tables(segments: Sequence[Segment], device: torch.device) -> BlockTables:
    """Of these sequences, on the device."""
    lengths = np.array([[s.query_offset + s.num_query, s.cache_len] for s in segments], dtype=np.int32)
    pages = np.zeros((len(segments), max(len(s.pages) for s in segments)), dtype=np.int32)
    for row, segment in zip(pages, segments, strict=True):
        row[: len(segment.pages)] = segment.pages

    def on_device(array: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return BlockTables(
        on_device(np.concatenate([[0], lengths[:, 0]]).astype(np.int32)),
        on_device(lengths[:, 1]),
        on_device(pages),
        max(s.num_query for s in segments),
        max(s.cache_len for s in segments),
    )


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """torch's paged varlen attention, or None where this torch has none (it came with 2.12)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"block_table", "seqused_k", "num_splits", "enable_gqa"}
    return varlen_attn if wanted <= inspect.signature(varlen_attn).parameters.keys() else None


def can_use(layer: LayerCache, page_size: int, scoring: Scoring) -> bool:
    """Whether the kernel is there, and computes what the layer asks for."""
    return (
        _varlen() is not None
        and layer.keys.dtype in (torch.float16, torch.bfloat16)
        and layer.keys.shape == layer.values.shape
        and page_size % _PAGE_TILE == 0
        and scoring.softcap is None
        and scoring.sinks is None
    )


def varlen_attention(
    tables: BlockTables, layer: LayerCache, page_size: int, query: Tensor, scoring: Scoring
) -> Tensor:
    """Attention by a paged CUDA kernel; query and result as in `views.view_attention`.

    `num_splits=1` makes a sequence's result bitwise the same whatever else is in the batch.
    """
    window, varlen = scoring.sliding_window, _varlen()
    assert varlen is not None
    shape = (-1, page_size, *layer.keys.shape[1:])
    output = varlen(
        query[0].transpose(0, 1).contiguous(),
        layer.keys.view(shape),
        layer.values.view(shape),
        tables.query_offsets,
        None,
        tables.max_query,
        tables.max_keys,
        scale=scoring.scale,
        # The kernel counts keys to the left of the query, the model counts the query too.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=tables.cache_lens,
        block_table=tables.pages,
        num_splits=1,
    )
    return cast(Tensor, output)[None]
