"""The memory that attention reads and writes, and how a layer scores keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scoring(NamedTuple):
    """How a layer turns queries and keys into weights, on top of plain causal attention.

    Attributes:
        scale: multiplies the scores.
        sliding_window: number of keys a query may see, its own included; None for all.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: [num_query_heads] extra logits in the softmax, without values.
        bias: added to the scores. Of a decoder [num_query_heads, num_distances], by how far a key is behind
            its query, the last entry for all that are farther; of an encoder [1, num_query_heads, num_tokens,
            num_tokens].
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None


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
        """Store new tokens: slots int64 [n], key and value [n, num_kv_heads, dim]."""
        self.keys.index_copy_(0, slots, key)
        self.values.index_copy_(0, slots, value)

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy tokens to other slots, all at once: int64 [n] each."""
        for slots in (self.keys, self.values):
            slots.index_copy_(0, dst, slots[src])
