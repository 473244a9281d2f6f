"""Attention that reads pages in place: a contiguous run of slots is a view, never a copy.

    sequence in one run              queries ──▶ fused kernel
    sequence in several runs         the same, over a copy of its keys
    sequences that begin alike       queries of all ──▶ fused kernel, over one copy of the keys of all, masked
    decoder with an encoder          its own keys follow those of the input, which other layers read

A call of the kernel takes as long as a copy of some hundred keys, so several runs are copied together. Each
read in place, with results merged by their weights, took 1.3 to 2 times as long with 500 keys, 0.9 times with
5,000, and 3.4 times for eight forks of 150 (one thread of an AMD EPYC, two KV heads of 64). Copied by their
slots, 80 keys take 36 us with the call of the kernel, and by runs 48 in two and 69 in four (of a Xeon).
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specwire.engine.attention.visibility import unseen_keys
from specwire.engine.batch import Segment
from specwire.engine.cache.kv_cache import Run, first_tokens
from specwire.engine.cache.layer_cache import LayerCache, Scoring

_sdpa = torch.nn.functional.scaled_dot_product_attention

# Up to this many masked queries the heads of a group are stacked as rows of one product, which reads each key
# once; beyond, the product is compute-bound, and a mask repeated for the group would be large.
_MAX_STACKED_QUERIES = 64
_QUERY_BLOCK = 256
_MOST_READ = 2
"""Sequences are read together while each query reads at most so many times its own keys. Over a call for each
run, with 2 and with 4: 0.55 and 0.55 of 32 forks of 530 keys that share 500, 0.60 and 0.55 of 8 of 300 that
share 200, 1.13 and 1.37 of 8 of 1,064 that share 64."""


class Read(NamedTuple):
    """Queries against some keys, all at once.

    Attributes:
        num_query: of them, the next ones in the order of the plan.
        slots: of the keys: a run of them, or each one, int64 [num_keys] on the cache's device.
        mask: additive, [group * num_query, num_keys] for stacked queries, else [num_query, num_keys]; None
            where all keys are seen or `is_causal` is set. With a bias [num_kv_heads, group, num_query,
            num_keys].
        is_causal: queries and keys are the same tokens, each seeing itself and earlier ones.
    """

    num_query: int
    slots: Run | Tensor
    mask: Tensor | None = None
    is_causal: bool = False


class ReadPlan(NamedTuple):
    """How a packed row reads every layer of one kind; made once a step.

    Attributes:
        places: int64 [num_tokens], of the queries in the packed row, read after read; None when they are in
            order.
        order: int64 [num_tokens], the other way round.
    """

    reads: Sequence[Read]
    places: Tensor | None = None
    order: Tensor | None = None


# ── planning ──────────────────────────────────────────────────────────────────────────────────────


def plan_reads(
    segments: Sequence[Segment], window: int | None, group: int, keys: Tensor, bias: Tensor | None = None
) -> ReadPlan:
    """How these segments read a cache like `keys`.

    Args:
        window: number of keys a query may see, its own included; None for all.
        group: query heads that share a KV head.
        bias: see `Scoring`.
    """
    views = [_View.of(segment, window) for segment in segments]
    if bias is not None:
        masks = [view.biased(bias, window, group, keys) for view in views]
        return ReadPlan(
            [
                Read(view.segment.num_query, _slots(view.runs, keys.device), mask)
                for view, mask in zip(views, masks, strict=True)
            ]
        )
    alike = defaultdict[int, list[_View]](list)
    for view in views:
        alike[view.runs[0].start_slot].append(view)
    groups = [group for some in alike.values() for group in _groups(some)]
    reads = [_read(each, window, group, keys) for each in groups]
    rows = [view.segment.rows for each in groups for view in each]
    if all(before.stop == after.start for before, after in itertools.pairwise(rows)):
        return ReadPlan(reads)
    places = torch.cat([torch.arange(each.start, each.stop) for each in rows])
    return ReadPlan(reads, places.to(keys.device), torch.argsort(places).to(keys.device))


def plan_inputs(segments: Sequence[Segment], device: torch.device) -> ReadPlan:
    """How decoders read the keys of their encoders' inputs: all of them, unmasked."""
    runs = [first_tokens(each.runs, each.encoder_len) for each in segments]
    return ReadPlan(
        [Read(each.num_query, _slots(some, device)) for each, some in zip(segments, runs, strict=True)]
    )


def plan_blocks(segments: Sequence[Segment], window: int | None, group: int, keys: Tensor) -> ReadPlan:
    """How tokens read that see all tokens of their sequence, later ones too, as far as a window reaches."""
    reads = []
    for segment in segments:
        first_key = 0 if window is None else max(0, segment.first_query - window)
        mask = None
        if window is not None:
            distances = np.abs(segment.positions[:, None] - np.arange(first_key, segment.cache_len))
            mask = torch.zeros(distances.shape).masked_fill_(torch.from_numpy(distances > window), -torch.inf)
            mask = mask.repeat(_stacked(segment.num_query, group), 1).to(keys.device, keys.dtype)
        reads.append(Read(segment.num_query, _slots(_skip(segment.runs, first_key), keys.device), mask))
    return ReadPlan(reads)


class _View(NamedTuple):
    """The keys from token `first_key` on, which one segment's queries may see; an encoder's input is before
    it."""

    segment: Segment
    first_key: int
    runs: Sequence[Run]

    @classmethod
    def of(cls, segment: Segment, window: int | None) -> _View:
        first_key = segment.encoder_len
        if window is not None:
            first_key = max(first_key, segment.num_common - window + 1)
        return cls(segment, first_key, segment.runs if first_key == 0 else _skip(segment.runs, first_key))

    @property
    def num_keys(self) -> int:
        return self.segment.cache_len - self.first_key

    def mask(self, window: int | None, group: int, keys: Tensor) -> Tensor | None:
        """[group * num_query or num_query, num_keys]; None for a single query that sees all of them."""
        num_query = self.segment.num_query
        if self.segment.tree is not None:
            return _tree_mask(self.segment, self.first_key, window, group, keys)
        return None if num_query == 1 else _mask(num_query, self.num_keys, window, group, keys)

    def biased(self, bias: Tensor, window: int | None, group: int, keys: Tensor) -> Tensor:
        """The mask with a bias by distance, [num_kv_heads, group, num_query, num_keys]."""
        num_query, tree = self.segment.num_query, self.segment.tree
        first, end = self.first_key, self.segment.cache_len
        places = np.arange(first, end) if tree is None else tree.positions(first, end)
        # From each query back to each key on its path; others are masked.
        behind = torch.from_numpy(self.segment.positions[:, None] - places)
        distances = behind.clamp_(0, bias.shape[1] - 1).to(bias.device)
        by_head = bias[:, distances].view(-1, group, num_query, self.num_keys)
        mask = self.mask(window, group, keys)
        return by_head if mask is None else by_head + mask.view(-1, num_query, self.num_keys)

    def whole(self, window: int | None, group: int, keys: Tensor) -> Read:
        segment, num_keys = self.segment, self.num_keys
        are_same = segment.tree is None and 1 < segment.num_query == num_keys
        is_causal = are_same and (window is None or num_keys <= window)
        mask = None if is_causal else self.mask(window, group, keys)
        return Read(segment.num_query, _slots(self.runs, keys.device), mask, is_causal)


def _groups(views: Sequence[_View]) -> list[list[_View]]:
    """Views whose keys begin alike, as they are read together."""
    groups: list[list[_View]] = [[]]
    num_queries = num_keys = 0
    for view in views:
        num_queries += view.segment.num_query
        num_keys += view.num_keys - view.runs[0].num_tokens
        most = _MOST_READ * view.num_keys - view.runs[0].num_tokens
        if groups[-1] and (num_queries > _MAX_STACKED_QUERIES or num_keys > most):
            groups.append([])
            num_queries, num_keys = view.segment.num_query, view.num_keys - view.runs[0].num_tokens
        groups[-1].append(view)
    return groups


def _read(views: Sequence[_View], window: int | None, group: int, keys: Tensor) -> Read:
    """Of one sequence, or of several with each run once and a mask of what is their own."""
    if len(views) == 1:
        return views[0].whole(window, group, keys)
    lengths: dict[int, int] = {}
    for run in itertools.chain.from_iterable(view.runs for view in views):
        lengths[run.start_slot] = max(run.num_tokens, lengths.get(run.start_slot, 0))
    places = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
    num_queries = sum(view.segment.num_query for view in views)
    mask = np.full((num_queries, sum(lengths.values())), -np.inf, np.float32)
    row = 0
    for view in views:
        own, end = view.mask(window, 1, keys), 0
        rows = slice(row, row := row + view.segment.num_query)
        for start_slot, num_tokens in view.runs:
            start, end = end, end + num_tokens
            seen = slice(places[start_slot], places[start_slot] + num_tokens)
            mask[rows, seen] = 0.0 if own is None else own[:, start:end].to("cpu", torch.float32)
    whole = torch.from_numpy(mask).repeat(group, 1).to(keys.device, keys.dtype)
    return Read(num_queries, _slots([Run(*each) for each in lengths.items()], keys.device), whole)


def _slots(runs: Sequence[Run], device: torch.device) -> Run | Tensor:
    """As in `Read`, of runs in a cache on this device."""
    if len(runs) == 1:
        return runs[0]
    slots = [np.arange(start, start + num_tokens) for start, num_tokens in runs]
    return torch.from_numpy(np.concatenate(slots)).to(device)


def _skip(runs: Sequence[Run], num_tokens: int) -> list[Run]:
    """The runs without their first `num_tokens` tokens."""
    kept = []
    for run in runs:
        skipped = min(num_tokens, run.num_tokens)
        num_tokens -= skipped
        if skipped < run.num_tokens:
            kept.append(Run(run.start_slot + skipped, run.num_tokens - skipped))
    return kept


def _stacked(num_query: int, group: int) -> int:
    """How many heads of a group are rows of one product: all of them, or each by itself."""
    return group if num_query <= _MAX_STACKED_QUERIES else 1


def _mask(num_query: int, num_keys: int, window: int | None, group: int, keys: Tensor) -> Tensor:
    """Additive mask, see `Read`; its last query and last key are the same token. It depends on their distance
    only, so one template is enough for all lengths."""
    if num_query > _MAX_STACKED_QUERIES:
        return _build_mask(num_query, num_keys, window, 1, keys.dtype, keys.device)
    capacity = max(256, 1 << (num_keys - 1).bit_length())
    template = _mask_template(num_query, capacity, window, group, keys.dtype, keys.device)
    return template[:, capacity - num_keys :]


def _tree_mask(segment: Segment, first_key: int, window: int | None, group: int, keys: Tensor) -> Tensor:
    """As `_mask`, for the keys from `first_key` on; without a window all see the first ones."""
    first = first_key if window is not None else max(first_key, segment.num_common)
    positions, words = torch.from_numpy(segment.positions), torch.from_numpy(segment.words)
    unseen = unseen_keys(positions, words, torch.arange(first, segment.cache_len), window)
    mask = torch.zeros(unseen.shape).masked_fill_(unseen, -torch.inf)
    mask = torch.nn.functional.pad(mask, (first - first_key, 0)).repeat(_stacked(len(mask), group), 1)
    return mask.to(keys.device, keys.dtype)


def _build_mask(
    num_query: int, num_keys: int, window: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    distance = torch.arange(num_keys - num_query, num_keys)[:, None] - torch.arange(num_keys)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = torch.zeros(num_query, num_keys).masked_fill_(hidden, -torch.inf)
    return mask.repeat(group, 1).to(device, dtype)


_mask_template = functools.lru_cache(maxsize=64)(_build_mask)


# ── attending ─────────────────────────────────────────────────────────────────────────────────────


def view_attention(plan: ReadPlan, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
    """Attention over views of the pages: of queries [num_tokens, num_query_heads, head_dim], the results
    [num_tokens, num_query_heads, value_dim]."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = layer.values.shape[1:]
    # Query heads grouped under their KV head, so that no key is repeated: [n, num_kv_heads, group, head_dim].
    grouped = query.reshape(num_tokens, num_kv_heads, -1, head_dim)
    if plan.places is not None:
        grouped = grouped[plan.places]
    attend, reads = attending(layer, scoring), plan.reads
    parts = grouped.split_with_sizes([read.num_query for read in reads])
    results = [attend(part, layer, read, scoring) for part, read in zip(parts, reads, strict=True)]
    output = torch.cat(results) if len(results) > 1 else results[0]
    if plan.order is not None:
        output = output[plan.order]
    return output.reshape(num_tokens, num_heads, value_dim)


def attending(layer: LayerCache, scoring: Scoring) -> Callable[[Tensor, LayerCache, Read, Scoring], Tensor]:
    """What attends in one read of the layer: torch's fused kernel where it supports that, else with scores
    computed here; query and result [n, num_kv_heads, group, head_dim]."""
    is_plain = scoring.softcap is None and scoring.sinks is None and layer.keys.shape == layer.values.shape
    return _fused if is_plain else _scored


def _fused(query: Tensor, layer: LayerCache, read: Read, scoring: Scoring) -> Tensor:
    num_query, mask, scale = read.num_query, read.mask, scoring.scale
    if mask is not None and mask.ndim == 4:  # with a bias
        if num_query > _MAX_STACKED_QUERIES:
            return _scored(query, layer, read, scoring)
        mask = mask.flatten(1, 2)[None]
    keys, values = _keys_and_values(layer, read.slots)
    if num_query == 1 and mask is None:
        # All keys are seen, and the group's heads are already the kernel's query rows.
        return _sdpa(query, keys, values, scale=scale)
    _, num_kv_heads, group, _ = query.shape
    if read.is_causal or num_query > _MAX_STACKED_QUERIES:
        # The group as batch; keys broadcast over it with stride 0.
        keys, values = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        rows = query.permute(2, 1, 0, 3)
        output = _sdpa(rows, keys, values, attn_mask=mask, is_causal=read.is_causal, scale=scale)
        return output.permute(2, 1, 0, 3)
    rows = query.permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * num_query, -1)
    output = _sdpa(rows, keys, values, attn_mask=mask, scale=scale)
    return output.view(num_kv_heads, group, num_query, -1).permute(2, 0, 1, 3)


def _keys_and_values(layer: LayerCache, slots: Run | Tensor) -> tuple[Tensor, Tensor]:
    """[1, num_kv_heads, num_keys, dim] each: views of a run, else copies."""
    if isinstance(slots, Run):
        return layer.keys_by_head.narrow(2, *slots), layer.values_by_head.narrow(2, *slots)
    keys, values = layer.keys.index_select(0, slots), layer.values.index_select(0, slots)
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def _scored(query: Tensor, layer: LayerCache, read: Read, scoring: Scoring) -> Tensor:
    """In blocks of queries."""
    keys, values = (each[0] for each in _keys_and_values(layer, read.slots))
    num_queries, mask = len(query), read.mask
    if read.is_causal:
        mask = _mask(num_queries, num_queries, None, query.shape[2], keys)
    if mask is not None and mask.ndim == 2:
        mask = mask.view(-1, num_queries, keys.shape[1])
    blocks = [slice(start, start + _QUERY_BLOCK) for start in range(0, num_queries, _QUERY_BLOCK)]
    masks = [None if mask is None else mask[..., block, :] for block in blocks]
    parts = [_score_block(query[b], keys, values, m, scoring) for b, m in zip(blocks, masks, strict=True)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _score_block(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    num_query, num_kv_heads, group, _ = query.shape
    rows = query.permute(1, 2, 0, 3).reshape(num_kv_heads, group * num_query, -1)
    scores = torch.bmm(rows, keys.transpose(1, 2)).view(num_kv_heads, group, num_query, -1)
    weights = softmax(scores, mask, scoring).to(query.dtype)
    output = torch.bmm(weights.reshape(num_kv_heads, group * num_query, -1), values)
    return output.view(num_kv_heads, group, num_query, -1).permute(2, 0, 1, 3)


def softmax(scores: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Weights float32 from raw scores [..., num_kv_heads, group, num_query, num_keys] (overwritten)."""
    scores *= scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh_(scores.div_(scoring.softcap)).mul_(scoring.softcap)
    if mask is not None:
        scores += mask
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    sinks = scoring.sinks.to(scores.dtype).view(*scores.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
    with_sinks = torch.cat([scores, sinks], dim=-1)
    return torch.softmax(with_sinks, dim=-1, dtype=torch.float32)[..., :-1]
