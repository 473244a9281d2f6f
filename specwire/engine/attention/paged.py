"""Paged attention for any transformers model, through the public `AttentionInterface`.

A step of the engine is one packed row: the new tokens of all sequences, one after another, without
padding. `running(batch)` tells `paged_attention`, which every attention layer calls in place of its own
function, of the `PackedBatch`. There the new keys and values are written into the layer's pages, and each
sequence attends to its own pages only.

    packed row     | a a a a | b | c c |            queries of three sequences
    layer's slots  [ b b b . | a a a a a a . . | c c c c ]

On a CPU the pages are read in place (`views.py`); on CUDA by torch's varlen kernel (`varlen.py`), or by plain
operations over gathered pages (`dense.py`), which a step with a tree always takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specwire.engine.attention import dense, varlen, views
from specwire.engine.batch import Segments
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.errors import UnsupportedError
from specwire.rule.transfer import to_device

ATTENTION_NAME = "specwire_paged"

# Keywords that some models pass to the attention function and that have no effect there.
_HARMLESS_KEYWORDS = frozenset(
    {"cache_position", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"position_ids", "return_dict", "use_cache", "num_items_in_batch"}
)


class Attend(Protocol):
    """What attends in a pass of a model: called by each attention layer once, in the model's order."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attention of one layer.

        Args:
            module: the layer's attention module.
            query: [num_tokens, num_query_heads, head_dim].
            key, value: [num_tokens, num_kv_heads, head_dim or value_dim], of the new tokens.
            scoring: how scores are computed.

        Returns:
            [num_tokens, num_query_heads, value_dim].
        """


@dataclass
class PackedBatch:
    """One step of the engine, made once and shared by all layers.

    Attributes:
        slots: int64 [num_tokens] on the model's device, where the row's keys and values are written.
        segments: the sequences in row order; their `num_query` add up to num_tokens.
        layers: the caches by attention module.
        page_size: slots in a page.
        recurrence: what recurrent layers run through; None without any.
        adapters: int64 [num_tokens], see `Batch`; None if no token has one.
        uses_tables: kernels for page tables may run; else pages are read as views.
    """

    slots: Tensor
    segments: Segments
    layers: dict[nn.Module, LayerCache]
    page_size: int
    recurrence: Any = None
    adapters: Tensor | None = None
    uses_tables: bool = True
    _plans: dict[tuple[int | None, int, int], views.ReadPlan] = field(init=False, default_factory=dict)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        layer = self.layers[module]
        layer.write(self.slots, key, value)
        return self.read(layer, query, scoring)

    def read(self, layer: LayerCache, query: Tensor, scoring: Scoring) -> Tensor:
        """Attention over what the layer holds; query and result as in `attend`."""
        if query.is_cuda and self.uses_tables:
            variant = self._over_tables.variant(layer, query, scoring)
            tables = self._over_tables.tables
            # Copying all keys is not always cheap enough.
            can_gather = dense.fits(len(self.segments), tables.max_query, tables.max_keys)
            if can_gather or (variant is not None and variant.paged):
                return self._over_tables.attend(variant, layer, query, scoring)
        return views.view_attention(self._plan(layer, query, scoring), layer, query, scoring)

    @cached_property
    def _over_tables(self) -> dense.TableAttention:
        segments, device = self.segments, self.slots.device
        words = to_device(segments.words(), device) if segments.trees else None

        def positions() -> Tensor:
            return to_device(np.concatenate([segment.positions for segment in segments]), device)

        tables = varlen.block_tables(segments, device)
        return dense.TableAttention(tables, positions, self.page_size, words)

    def _plan(self, layer: LayerCache, query: Tensor, scoring: Scoring) -> views.ReadPlan:
        """The read plan for layers like this one."""
        window, group, bias = scoring.sliding_window, query.shape[1] // layer.keys.shape[1], scoring.bias
        if (kind := (window, group, id(bias))) not in self._plans:
            self._plans[kind] = views.plan_reads(self.segments, window, group, layer.keys, bias)
        return self._plans[kind]


_running: ContextVar[Attend | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def running(packed: Attend) -> Iterator[None]:
    """Passes in this thread attend with it. A keyword would not do: layers of some families pass none on."""
    token = _running.set(packed)
    try:
        yield
    finally:
        _running.reset(token)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function as transformers calls it: of query, key, and value [1, num_heads, num_tokens,
    dim], the result [1, num_tokens, num_query_heads, value_dim].

    Raises:
        UnsupportedError: an argument that would change the result and is not implemented (a position bias but
            for an encoder-decoder's, dropout, a mask of the model's own, attention that is not causal).
    """
    packed = _running.get()
    if packed is None:
        raise UnsupportedError("packed", None, f"{ATTENTION_NAME} attention runs inside the engine only")
    if attention_mask is not None or dropout or is_causal is False or keywords:
        _refuse_unknown(attention_mask, dropout, is_causal, keywords)
    if position_bias is not None and not getattr(packed, "takes_bias", False):
        _refuse_unknown(None, 0.0, None, {"position_bias": position_bias})
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scoring = Scoring(scaling, sliding_window, softcap, s_aux, position_bias)
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return packed.attend(module, query, key, value, scoring)[None].contiguous(), None  # some layers view it


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


_registered = paged_attention


def register() -> None:
    """Register the attention function with transformers under `ATTENTION_NAME`; may be repeated.

    Without a mask function, transformers' mask builders return None at once, as `PackedBatch` needs it.
    """
    AttentionInterface.register(ATTENTION_NAME, _registered)


def hide_from_compiler() -> None:
    """From now on torch's compiler calls the function, of whatever model, and does not look into it."""
    global _registered
    _registered = torch.compiler.disable(paged_attention)  # type: ignore[no-untyped-call]
    register()
