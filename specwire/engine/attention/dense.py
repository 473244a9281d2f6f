"""Paged attention from plain tensor operations, for any device: pages are gathered into dense tensors.

    pages of a sequence   ──gather──▶  keys    [num_segments, num_kv_heads, max_keys, head_dim]
    its queries           ──gather──▶  queries [num_segments, num_kv_heads, group * max_query, head_dim]

Nothing depends on a value that is only known on the device, so all of it can be captured in a CUDA graph. It
is used where torch's paged kernel (`varlen.py`) is missing or does not support a layer. It copies keys and
values once in every layer, which is little compared with a large model's weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specwire.engine.attention import views
from specwire.engine.attention.varlen import BlockTables, Variant, VarlenStep, find_variant
from specwire.engine.attention.visibility import unseen_keys
from specwire.engine.cache.layer_cache import LayerCache, Scoring

_MAX_GATHERED_KEYS = 1 << 17
_MAX_SCORES = 1 << 24
_ALIGNMENT = 16
"""Fused kernels need rows of the mask to be multiples of this."""


def fits(num_segments: int, max_query: int, max_keys: int) -> bool:
    """Whether the copies of a step of this size stay small, counting keys and scores of one head."""
    num_keys = num_segments * max_keys
    return num_keys <= _MAX_GATHERED_KEYS and num_keys * max_query <= _MAX_SCORES


class DenseStep:
    """The dense layout of a step's queries and keys; made once and shared by all layers.

    A token outside all segments (padding) gets another token's result. Unused rows and keys of the layout are
    computed like the others, and never read.

    Args:
        tables: the segments; the layout has `max_query` queries and `max_keys` keys for each.
        positions: int64 [num_tokens], each token's position in its own sequence.
        page_size: slots in a page.
        words: int64 [num_tokens], the nodes that each token sees, see `TokenTree`; None without trees.
    """

    def __init__(
        self, tables: BlockTables, positions: Tensor, page_size: int, words: Tensor | None = None
    ) -> None:
        self._positions, self._words = positions, words
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        device, num_tokens = positions.device, len(positions)
        offsets, max_query = tables.query_offsets.long(), tables.max_query
        starts = offsets[:-1]
        column = torch.arange(max_query, device=device)
        self._rows = (starts[:, None] + column).clamp_(max=num_tokens - 1)
        # Past its end a sequence repeats its last key: stale keys of others may not be finite.
        self._max_keys = -(-tables.max_keys // _ALIGNMENT) * _ALIGNMENT
        self._max_keys = min(tables.pages.shape[1] * page_size, self._max_keys)
        key = torch.arange(self._max_keys, device=device).minimum(tables.cache_lens.long()[:, None] - 1)
        pages = tables.pages.long().gather(1, key // page_size)
        self._slots = pages * page_size + key % page_size
        token = torch.arange(num_tokens, device=device)
        segment = torch.searchsorted(offsets[1:], token, right=True).clamp_(max=len(starts) - 1)
        self._places = segment * max_query + (token - starts[segment]).clamp_(0, max_query - 1)

    def attend(self, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention of one layer; query and result as in `views.view_attention`."""
        _, num_heads, head_dim = query.shape
        num_segments, max_query = self._rows.shape
        num_kv_heads, value_dim = layer.values.shape[1:]
        group = num_heads // num_kv_heads
        rows = query[self._rows].view(num_segments, max_query, num_kv_heads, group, -1)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(num_segments, num_kv_heads, group * max_query, head_dim)
        keys, values = (pages[self._slots].transpose(1, 2) for pages in (layer.keys, layer.values))
        mask = self._mask(scoring.sliding_window, group, query.dtype)
        if scoring.softcap is None and scoring.sinks is None:
            output = torch.nn.functional.scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, scale=scoring.scale
            )
        else:
            scores = (rows @ keys.transpose(2, 3)).float()
            scores = scores.view(num_segments, num_kv_heads, group, max_query, -1)
            weights = views.softmax(scores, mask.view(num_segments, 1, group, max_query, -1), scoring)
            output = weights.flatten(2, 3).to(values.dtype) @ values
        output = output.view(num_segments, num_kv_heads, group, max_query, value_dim).permute(0, 3, 1, 2, 4)
        return output.reshape(-1, num_heads, value_dim)[self._places]

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Additive, [num_segments, 1, group * max_query, max_keys]; every row sees at least one key."""
        if (window, group) not in self._masks:
            hidden = self._hidden(window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask = mask.masked_fill_(hidden, -torch.inf).repeat(1, group, 1)
            self._masks[window, group] = mask[:, None]
        return self._masks[window, group]

    def _hidden(self, window: int | None) -> Tensor:
        """bool [num_segments, max_query, max_keys]."""
        positions = self._positions[self._rows]
        keys = torch.arange(self._max_keys, device=positions.device)
        if self._words is not None:
            return unseen_keys(positions, self._words[self._rows], keys, window)
        hidden = keys > positions[:, :, None]
        if window is not None:
            hidden |= keys <= positions[:, :, None] - window
        return hidden


class TableAttention:
    """Attention of a step over block tables, by torch's kernel where it supports a layer; else dense, see
    `DenseStep`, whose positions are computed where they are needed."""

    def __init__(
        self, tables: BlockTables, positions: Callable[[], Tensor], page_size: int, words: Tensor | None
    ) -> None:
        self.tables, self._positions, self._page_size, self._words = tables, positions, page_size, words
        self._varlen: VarlenStep | None = None
        self._dense: DenseStep | None = None

    def variant(self, layer: LayerCache, query: Tensor, scoring: Scoring) -> Variant | None:
        """How torch's kernel attends in this step; None where it cannot: it knows chains only."""
        if self._words is not None:
            return None
        return find_variant(layer, self._page_size, query.shape[1], scoring)

    def attend(self, variant: Variant | None, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
        if variant is not None:
            if self._varlen is None:
                self._varlen = VarlenStep(self.tables, self._page_size)
            return self._varlen.attend(variant, layer, query, scoring)
        if self._dense is None:
            self._dense = DenseStep(self.tables, self._positions(), self._page_size, self._words)
        return self._dense.attend(layer, query, scoring)
