"""Paged attention for any transformers model, through the public `AttentionInterface`.

A step of the engine is one packed row: the new tokens of all sequences, one after another, without
padding. `model.forward(..., packed=batch)` carries a `PackedBatch` to `paged_attention`, which every
attention layer calls in place of its own function. There the new keys and values are written into
the layer's pages, and each sequence attends to its own pages only.

    packed row     | a a a a | b | c c |            queries of three sequences
    layer's slots  [ b b b . | a a a a a a . . | c c c c ]

On a CPU the pages are read where they lie: a contiguous run of slots is a view, never a copy.
On CUDA `torch.nn.attention.varlen` does the same through a block table, where torch has it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specwire.core import IntArray
from specwire.engine.kv_cache import Run
from specwire.errors import UnsupportedError

_sdpa = torch.nn.functional.scaled_dot_product_attention
ATTENTION_NAME = "specwire_paged"

# FlashAttention-2, which torch carries, reads pages in tiles of this many tokens.
_VARLEN_PAGE_TILE = 256
# Keywords that some models pass on to the attention function and that change nothing there.
_HARMLESS_KEYWORDS = frozenset(
    {"cache_position", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"position_ids", "return_dict", "use_cache", "num_items_in_batch"}
)
# Up to this many queries the heads of a group are stacked as rows of one product, which reads each key
# once; beyond, the product is bound by arithmetic, and a mask repeated for the group would be large.
_MAX_STACKED_QUERIES = 64
_QUERY_BLOCK = 256


class Scoring(NamedTuple):
    """How a layer turns queries and keys into weights, on top of plain causal attention.

    Attributes:
        scale: multiplies the scores.
        sliding_window: keys a query may see, itself included; None for all.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: [num_query_heads] extra logits that take part in the softmax and carry no value.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Segment(NamedTuple):
    """One sequence's share of a packed row.

    Attributes:
        query_offset: its first token's index in the row.
        num_query: its tokens in the row, at least 1.
        cache_len: tokens in its cache, those of the row included.
        runs: where its cache lies, in token order.
        pages: its page table.
    """

    query_offset: int
    num_query: int
    cache_len: int
    runs: Sequence[Run]
    pages: Sequence[int]


class LayerCache:
    """Keys and values of one layer for all sequences.

    Attributes:
        keys: [num_slots, num_kv_heads, head_dim]; slots are page-major, so this is also the memory of
            [num_pages, page_size, num_kv_heads, head_dim].
        values: [num_slots, num_kv_heads, value_dim].
        keys_by_head, values_by_head: views of these as [1, num_kv_heads, num_slots, dim].
    """

    __slots__ = ("keys", "keys_by_head", "values", "values_by_head")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.keys_by_head = keys.transpose(0, 1)[None]
        self.values_by_head = values.transpose(0, 1)[None]

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new tokens: slots int64 [n], key and value [1, num_kv_heads, n, dim]."""
        self.keys.index_copy_(0, slots, key[0].transpose(0, 1))
        self.values.index_copy_(0, slots, value[0].transpose(0, 1))

    def copy(self, src_slot: int, dst_slot: int, num_tokens: int) -> None:
        """Copy consecutive tokens to other slots that do not overlap them."""
        for pages in (self.keys, self.values):
            pages[dst_slot : dst_slot + num_tokens] = pages[src_slot : src_slot + num_tokens]


class Attend(Protocol):
    """What travels as `packed=`: it sees each attention layer once, in the model's order."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attention of one layer.

        Args:
            module: the layer's attention module.
            query: [1, num_query_heads, num_tokens, head_dim].
            key, value: [1, num_kv_heads, num_tokens, head_dim or value_dim] of the new tokens.
            scoring: how scores become weights.

        Returns:
            [1, num_tokens, num_query_heads, value_dim].
        """


@dataclass
class PackedBatch:
    """One step of the engine, made once and shared by all layers.

    Attributes:
        slots: int64 [num_tokens] on the model's device, where the row's keys and values go.
        segments: the sequences in row order; their `num_query` add up to num_tokens.
        layers: the caches by attention module.
        page_size: slots in a page.
    """

    slots: Tensor
    segments: Sequence[Segment]
    layers: dict[nn.Module, LayerCache]
    page_size: int
    num_queries: list[int] = field(init=False)
    _plans: dict[tuple[int | None, int], list[ReadPlan]] = field(init=False, default_factory=dict)
    _block_tables: BlockTables | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.num_queries = [segment.num_query for segment in self.segments]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `Attend`."""
        layer = self.layers[module]
        layer.write(self.slots, key, value)
        if query.is_cuda and _can_use_varlen(layer, self.page_size, scoring):
            return varlen_attention(self, layer, query, scoring)
        return view_attention(self, layer, query, scoring)

    def plans(self, window: int | None, group: int, keys: Tensor) -> list[ReadPlan]:
        """How each segment reads a cache like `keys` under this window; made once a step.

        `group` is the number of query heads that share a KV head.
        """
        plans = self._plans.get((window, group))
        if plans is None:
            plans = [_plan(segment, window, group, keys) for segment in self.segments]
            self._plans[window, group] = plans
        return plans

    def block_tables(self) -> BlockTables:
        """The same for a CUDA kernel; made once a step."""
        if self._block_tables is None:
            self._block_tables = _block_tables(self.segments, self.slots.device)
        return self._block_tables


# ── registration ──────────────────────────────────────────────────────────────────────────────────


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Attend | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it; shapes as in `Attend.attend`.

    Raises:
        UnsupportedError: anything that changes the result and is not implemented here (a position
            bias, dropout, a mask of the model's own, attention that is not causal).
    """
    if packed is None:
        raise UnsupportedError("packed", None, f"{ATTENTION_NAME} attention runs inside the engine only")
    if attention_mask is not None or dropout or is_causal is False or keywords:
        _refuse_unknown(attention_mask, dropout, is_causal, keywords)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scoring = Scoring(scaling, sliding_window, softcap, s_aux)
    return packed.attend(module, query, key, value, scoring), None


def _refuse_unknown(
    attention_mask: object, dropout: float, is_causal: bool | None, keywords: dict[str, Any]
) -> None:
    if attention_mask is not None:
        raise UnsupportedError("attention_mask", "given", "the model brings an attention mask of its own")
    if dropout:
        raise UnsupportedError("dropout", dropout, "attention dropout is for training")
    if is_causal is False:
        raise UnsupportedError("is_causal", is_causal, "attention that looks ahead cannot be decoded")
    for name, value in keywords.items():
        if name not in _HARMLESS_KEYWORDS and value is not None and value is not False:
            raise UnsupportedError(name, type(value).__name__, "not implemented by the paged attention")


def register() -> None:
    """Make the attention function known to transformers under `ATTENTION_NAME`; may be repeated.

    No mask function goes with it: for an implementation without one, transformers' mask builders
    return None at once, which is what `PackedBatch` needs, and skip work of their own.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


# ── reading pages in place ────────────────────────────────────────────────────────────────────────


class ReadPlan(NamedTuple):
    """How one segment reads its cache in every layer with the same window.

    Attributes:
        start_slot, num_keys: the keys as one run; meaningful when `runs` has one entry.
        mask: additive, or None where all keys are seen or `is_causal` says it. [group * num_query, num_keys]
            for queries that are to be stacked, else [num_query, num_keys].
        is_causal: queries and keys are the same tokens, each seeing itself and those before.
        runs: the keys, in token order.
    """

    start_slot: int
    num_keys: int
    mask: Tensor | None
    is_causal: bool
    runs: Sequence[Run]


def _plan(segment: Segment, window: int | None, group: int, keys: Tensor) -> ReadPlan:
    num_query, cache_len = segment.num_query, segment.cache_len
    first_key = 0 if window is None else max(0, cache_len - num_query - window + 1)
    runs = segment.runs if first_key == 0 else _skip(segment.runs, first_key)
    num_keys = cache_len - first_key
    is_causal = num_query > 1 and num_query == cache_len and (window is None or cache_len <= window)
    mask = None
    if num_query > 1 and not is_causal:
        mask = _mask(num_query, num_keys, window, group, keys)
    return ReadPlan(runs[0].start_slot, num_keys, mask, is_causal, runs)


def _skip(runs: Sequence[Run], num_tokens: int) -> list[Run]:
    """The runs without their first `num_tokens` tokens."""
    kept = []
    for run in runs:
        skipped = min(num_tokens, run.num_tokens)
        num_tokens -= skipped
        if skipped < run.num_tokens:
            kept.append(Run(run.start_slot + skipped, run.num_tokens - skipped))
    return kept


def _mask(num_query: int, num_keys: int, window: int | None, group: int, keys: Tensor) -> Tensor:
    """Additive mask as `ReadPlan` has it; its last query and last key are the same token.

    Whether a query sees a key depends on their distance only, so one template serves all lengths.
    """
    if num_query > _MAX_STACKED_QUERIES:
        return _build_mask(num_query, num_keys, window, 1, keys.dtype, keys.device)
    capacity = max(256, 1 << (num_keys - 1).bit_length())
    template = _mask_template(num_query, capacity, window, group, keys.dtype, keys.device)
    return template[:, capacity - num_keys :]


def _build_mask(
    num_query: int, num_keys: int, window: int | None, group: int, *dtype_and_device: Any
) -> Tensor:
    query_index = torch.arange(num_keys - num_query, num_keys)[:, None]
    distance = query_index - torch.arange(num_keys)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = torch.zeros(num_query, num_keys).masked_fill_(hidden, -torch.inf)
    dtype, device = dtype_and_device
    return mask.repeat(group, 1).to(device, dtype)


_mask_template = functools.lru_cache(maxsize=64)(_build_mask)


def view_attention(packed: PackedBatch, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
    """Attention over views of the pages, one sequence at a time; arguments and result as in `Attend`."""
    num_heads, num_tokens, head_dim = query.shape[1:]
    num_kv_heads, value_dim = layer.values.shape[1:]
    plans = packed.plans(scoring.sliding_window, num_heads // num_kv_heads, layer.keys)
    # Query heads grouped under their KV head, so that no key is repeated: [n, num_kv_heads, group, head_dim].
    grouped = query[0].transpose(0, 1).reshape(num_tokens, num_kv_heads, -1, head_dim)
    pieces = grouped.split_with_sizes(packed.num_queries) if len(plans) > 1 else (grouped,)
    plain = scoring.softcap is None and scoring.sinks is None and value_dim == head_dim
    outputs = [
        _fused(piece, layer, plan, scoring.scale)
        if plain and len(plan.runs) == 1
        else _by_runs(piece, layer, plan, scoring)
        for piece, plan in zip(pieces, plans, strict=True)
    ]
    output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return output.reshape(1, num_tokens, num_heads, value_dim)


def _fused(query: Tensor, layer: LayerCache, plan: ReadPlan, scale: float) -> Tensor:
    """One run: torch's fused kernel on views. query [n, num_kv_heads, group, head_dim], result alike."""
    keys = layer.keys_by_head.narrow(2, plan.start_slot, plan.num_keys)
    values = layer.values_by_head.narrow(2, plan.start_slot, plan.num_keys)
    num_query, num_kv_heads, group, _ = query.shape
    if num_query == 1:
        # All keys are seen, and the group's heads are already the kernel's query rows.
        return _sdpa(query, keys, values, scale=scale)
    if plan.is_causal or num_query > _MAX_STACKED_QUERIES:
        # The group as batch; keys broadcast over it with stride 0.
        keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        rows = query.permute(2, 1, 0, 3)
        output = _sdpa(rows, keys, values, attn_mask=plan.mask, is_causal=plan.is_causal, scale=scale)
        return output.permute(2, 1, 0, 3)
    rows = query.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * num_query, -1)
    output = _sdpa(rows, keys, values, attn_mask=plan.mask, scale=scale)
    return output.view(num_kv_heads, group, num_query, -1).permute(2, 0, 1, 3)


def _by_runs(query: Tensor, layer: LayerCache, plan: ReadPlan, scoring: Scoring) -> Tensor:
    """Several runs, or what the fused kernel lacks. Shapes as in `_fused`."""
    num_query, group = query.shape[0], query.shape[2]
    mask = plan.mask
    if plan.is_causal:
        mask = _mask(num_query, plan.num_keys, None, group, layer.keys)
    if mask is not None:
        mask = mask.view(-1, num_query, plan.num_keys)
    if num_query <= _QUERY_BLOCK:
        return _block_by_runs(query, layer, plan.runs, mask, scoring)
    assert mask is not None  # more than one query
    blocks = [slice(start, start + _QUERY_BLOCK) for start in range(0, num_query, _QUERY_BLOCK)]
    return torch.cat([_block_by_runs(query[b], layer, plan.runs, mask[:, b], scoring) for b in blocks])


def _block_by_runs(
    query: Tensor, layer: LayerCache, runs: Sequence[Run], mask: Tensor | None, scoring: Scoring
) -> Tensor:
    num_query, num_kv_heads, group, _ = query.shape
    rows = query.permute(1, 2, 0, 3).reshape(num_kv_heads, group * num_query, -1)
    views = [(layer.keys_by_head[0].narrow(1, *run), layer.values_by_head[0].narrow(1, *run)) for run in runs]
    scores = torch.cat([torch.bmm(rows, keys.transpose(1, 2)) for keys, _ in views], dim=-1)
    scores = scores.view(num_kv_heads, group, num_query, -1)
    weights = _softmax(scores, mask, scoring).to(query.dtype)
    weights = weights.reshape(num_kv_heads, group * num_query, -1)
    parts = weights.split_with_sizes([run.num_tokens for run in runs], dim=-1)
    output = torch.bmm(parts[0], views[0][1])
    for part, (_, values) in zip(parts[1:], views[1:], strict=True):
        output += torch.bmm(part, values)
    return output.view(num_kv_heads, group, num_query, -1).permute(2, 0, 1, 3)


def _softmax(scores: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention weights float32 from raw scores [num_kv_heads, group, num_query, num_keys] (overwritten)."""
    scores *= scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh_(scores.div_(scoring.softcap)).mul_(scoring.softcap)
    if mask is not None:
        scores += mask
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    num_kv_heads, group, num_query, _ = scores.shape
    sinks = scoring.sinks.view(num_kv_heads, group, 1, 1).expand(-1, -1, num_query, -1)
    with_sinks = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return torch.softmax(with_sinks, dim=-1, dtype=torch.float32)[..., :-1]


# ── CUDA: block tables ────────────────────────────────────────────────────────────────────────────


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


def _block_tables(segments: Sequence[Segment], device: torch.device) -> BlockTables:
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


def _can_use_varlen(layer: LayerCache, page_size: int, scoring: Scoring) -> bool:
    return (
        _varlen() is not None
        and layer.keys.dtype in (torch.float16, torch.bfloat16)
        and layer.keys.shape == layer.values.shape
        and page_size % _VARLEN_PAGE_TILE == 0
        and scoring.softcap is None
        and scoring.sinks is None
    )


def varlen_attention(packed: PackedBatch, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
    """Attention by a paged CUDA kernel; arguments and result as in `Attend`.

    `num_splits=1` makes a sequence's result bitwise the same whatever else is in the batch.
    """
    tables, window, varlen = packed.block_tables(), scoring.sliding_window, _varlen()
    assert varlen is not None
    shape = (-1, packed.page_size, *layer.keys.shape[1:])
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


def make_slots(parts: Sequence[IntArray], device: torch.device) -> Tensor:
    """Slots of all segments as one int64 tensor on the device."""
    slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return torch.from_numpy(slots).to(device)
