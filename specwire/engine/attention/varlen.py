"""Attention with torch's varlen CUDA kernel: over pages where it supports them, else over gathered keys.

Which variants work is found by trying them. torch 2.12 added pages to its signature, but what a call does
depends on the flash attention behind it: some releases refuse `num_splits`, some refuse pages, and some wrote
wrong rows where one sequence's keys were split among blocks (pytorch issue 194167). So each variant is tried
once for each kind of layer, on random numbers, and compared with attention in float32. A variant that raises
or differs is not used; if none is left, `dense.py` is used instead.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from specwire.engine.attention import views
from specwire.engine.batch import Segments
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.rule.transfer import to_device

log = logging.getLogger(__name__)

# FlashAttention-2, which torch carries, reads pages in tiles of this many tokens.
PAGE_TILE = 256
_BASE = frozenset({"window_size", "scale"})
_PAGED = _BASE | {"block_table", "seqused_k"}
_TOLERANCE = 0.03
"""Largest error over random numbers of unit variance in half precision; correct kernels stay below 0.01."""


class BlockTables(NamedTuple):
    """The segments of a step as a paged kernel reads them; all int32 on the device.

    Attributes:
        query_offsets: [num_segments + 1].
        cache_lens: [num_segments].
        pages: [num_segments, most pages], padded with any page.
        max_query, max_keys: upper bounds of queries and keys of a sequence.
    """

    query_offsets: Tensor
    cache_lens: Tensor
    pages: Tensor
    max_query: int
    max_keys: int


def block_tables(segments: Segments, device: torch.device) -> BlockTables:
    return BlockTables(
        to_device(np.array(segments.query_offsets, np.int32), device),
        to_device(np.array(segments.cache_lens, np.int32), device),
        to_device(segments.page_table(), device),
        segments.max_query,
        max(segments.cache_lens),
    )


class Variant(NamedTuple):
    """A way of calling the kernel.

    Attributes:
        paged: it finds keys through a block table; else they are gathered before the call.
        options: further keyword arguments.
    """

    paged: bool
    options: tuple[tuple[str, Any], ...] = ()


class LayerKind(NamedTuple):
    """What the kernel's behaviour may depend on."""

    device: torch.device
    dtype: torch.dtype
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    windowed: bool


def find_variant(layer: LayerCache, page_size: int, num_query_heads: int, scoring: Scoring) -> Variant | None:
    """The best variant for the layer; None where the kernel does not support it."""
    keys = layer.keys
    if not keys.is_cuda or keys.shape != layer.values.shape:
        return None
    if scoring.softcap is not None or scoring.sinks is not None:
        return None
    num_kv_heads, head_dim = keys.shape[1:]
    windowed = scoring.sliding_window is not None
    return _variant(
        LayerKind(keys.device, keys.dtype, num_query_heads, num_kv_heads, head_dim, page_size, windowed)
    )


class VarlenStep:
    """The sequences of a step as the kernel reads them; made once and shared by all layers.

    Nothing depends on a value that is only known on the device, so it can be captured in a CUDA graph.
    """

    def __init__(self, tables: BlockTables, page_size: int) -> None:
        self.tables = tables
        self._page_size = page_size
        self._gathered: tuple[Tensor, Tensor] | None = None

    def attend(self, variant: Variant, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of one layer; query and result as in `views.view_attention`.

        The keys of a sequence are never split among blocks, so its result is bitwise independent of the rest
        of the batch. Rows outside all segments are undefined.
        """
        tables, window, varlen = self.tables, scoring.sliding_window, _varlen()
        assert varlen is not None
        keys, values, offsets, keywords = self._keys(variant, layer)
        output = varlen(
            query.contiguous(),
            keys,
            values,
            tables.query_offsets,
            offsets,
            # With one query per sequence FlashAttention-2 splits the keys depending on the batch.
            max(2, tables.max_query),
            tables.max_keys,
            scale=scoring.scale,
            # The kernel counts keys left of the query; the model counts the query's own too.
            window_size=(-1 if window is None else window - 1, 0),
            **keywords,
        )
        return cast(Tensor, output)

    def _keys(
        self, variant: Variant, layer: LayerCache
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Keys, values, the offsets of each sequence's keys, and the keyword arguments for them."""
        if not variant.paged:
            if self._gathered is None:
                self._gathered = self._gather()
            slots, offsets = self._gathered
            return layer.keys[slots], layer.values[slots], offsets, dict(variant.options)
        shape = (-1, self._page_size, *layer.keys.shape[1:])
        tables = {"seqused_k": self.tables.cache_lens, "block_table": self.tables.pages}
        return layer.keys.view(shape), layer.values.view(shape), None, {**tables, **dict(variant.options)}

    def _gather(self) -> tuple[Tensor, Tensor]:
        """Slots of all sequences' keys, int64 [num_segments * max_keys], and their offsets, int32
        [num_segments + 1]. Slots after the last offset are padding and repeat some key."""
        tables = self.tables
        offsets = torch.nn.functional.pad(tables.cache_lens.cumsum(0, dtype=torch.int32), (1, 0))
        num_segments, num_pages = tables.pages.shape
        num_keys = num_segments * min(tables.max_keys, num_pages * self._page_size)
        place = torch.arange(num_keys, device=offsets.device)
        segment = torch.searchsorted(offsets[1:], place, right=True).clamp_(max=num_segments - 1)
        last = tables.cache_lens.long()[segment] - 1
        key = (place - offsets.long()[segment]).minimum(last)
        page = tables.pages.long()[segment, key // self._page_size]
        return page * self._page_size + key % self._page_size, offsets


# ── finding a variant ───────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """torch's varlen attention if its signature has what every variant needs, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if inspect.signature(varlen_attn).parameters.keys() >= _BASE else None


@functools.cache
def _variant(kind: LayerKind) -> Variant | None:
    """The best variant that computes this kind of layer correctly."""
    if _varlen() is None or kind.dtype not in (torch.float16, torch.bfloat16):
        return None
    for variant in _variants():
        try:
            error = max(_error_on(variant, kind, lengths) for lengths in _trials(kind.page_size))
        except RuntimeError as problem:
            log.info("varlen attention, %s: %s", variant, str(problem).partition("\n")[0])
            continue
        if error <= _TOLERANCE:
            return variant
        log.warning("varlen attention of this torch is wrong by %.2g: %s is not used", error, variant)
    return None


def _variants() -> list[Variant]:
    """The variants that the signature allows, the best first."""
    known = inspect.signature(_varlen() or _variants).parameters.keys()
    groups = (("enable_gqa", True),) if "enable_gqa" in known else ()
    unsplit = ((*groups, ("num_splits", 1)),) if "num_splits" in known else ()
    kinds = [True, False] if known >= _PAGED else [False]
    return [Variant(paged, options) for paged in kinds for options in (*unsplit, groups)]


def _trials(page_size: int) -> list[list[tuple[int, int]]]:
    """Batches of (queries, keys) that exposed bugs before: verify beside decode, many decodes over long
    caches, one of each alone."""
    long = 3 * page_size + 1
    return [
        [(3, page_size + 7), (1, 5), (6, long), (2, 2), (1, 1)],
        [(1, long), (1, 7), (1, 2 * page_size), (1, long - 2)],
        [(1, long)],
        [(6, 2 * page_size)],
    ]


def _error_on(variant: Variant, kind: LayerKind, lengths: Sequence[tuple[int, int]]) -> float:
    """Largest difference from attention in float32 on views of the pages; inf if the result is not finite."""
    generator = torch.Generator(kind.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator, device=kind.device)
        return numbers.to(kind.dtype)

    segments = _segments(lengths, kind.page_size)
    shape = sum(map(len, segments.tables)) * kind.page_size, kind.num_kv_heads, kind.head_dim
    layer = LayerCache(random(*shape), random(*shape))
    query = random(sum(num_query for num_query, _ in lengths), kind.num_query_heads, kind.head_dim)
    window = kind.page_size // 2 if kind.windowed else None
    scoring = Scoring(kind.head_dim**-0.5, window)
    tables = block_tables(segments, kind.device)
    output = VarlenStep(tables, kind.page_size).attend(variant, layer, query, scoring)
    exact = LayerCache(layer.keys.float(), layer.values.float())
    plan = views.plan_reads(segments, window, kind.num_query_heads // kind.num_kv_heads, exact.keys)
    wanted = views.view_attention(plan, exact, query.float(), scoring)
    difference = (output.float() - wanted).abs().max().item()
    return math.inf if math.isnan(difference) else difference


def _segments(lengths: Sequence[tuple[int, int]], page_size: int) -> Segments:
    """Sequences with pages that are neither adjacent nor in order."""
    num_query, num_keys = zip(*lengths, strict=True)
    counts = [-(-num // page_size) for num in num_keys]
    order = list(range(sum(counts)))[::-1]
    tables = [array("i", (order.pop(len(order) // 2) for _ in range(count))) for count in counts]
    return Segments([*accumulate(num_query, initial=0)], num_keys, tables, page_size, {})
