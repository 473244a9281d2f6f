"""The shapes of a model's attention layers, recorded in a forward pass of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from specwire.engine.attention import varlen
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.errors import ModelLoadError

ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"})
"""Types of layers, as configs name them, that attend to all tokens or to a window of the last ones."""
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Those that keep a state."""
PLAIN_TYPES = frozenset({"mlp", "moe"})
"""Those that keep nothing."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One token's key and value in a layer, [num_kv_heads, dim] each, and the layer's scoring."""

    key: Tensor
    value: Tensor
    num_query_heads: int
    scoring: Scoring

    def allocate(self, num_slots: int) -> LayerCache:
        return LayerCache(
            self.key.new_zeros((num_slots, *self.key.shape)),
            self.value.new_zeros((num_slots, *self.value.shape)),
        )


class Probe:
    """Takes the place of a `PackedBatch` of one token, and records what each layer passes to it."""

    def __init__(self, recurrence: Any = None) -> None:
        self.shapes: dict[nn.Module, LayerShape] = {}
        self.recurrence = recurrence

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`. A single token attends to itself, so its value is the result."""
        name = type(module).__name__
        if module in self.shapes:
            raise ModelLoadError(f"{name} attends twice in one pass, which the KV cache cannot tell apart")
        if getattr(module, "is_causal", True) is False:
            raise ModelLoadError(f"{name} looks ahead (is_causal is False)")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise ModelLoadError(f"{name} has {query.shape[1]} query and {key.shape[1]} key heads")
        self.shapes[module] = LayerShape(key[0], value[0], query.shape[1], scoring)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def attention_path(self, page_size: int) -> str:
        """How steps on CUDA attend: `paged` or `gathered` with torch's varlen kernel, or `dense`; what every
        layer supports."""
        variants = [
            varlen.find_variant(shape.allocate(0), page_size, shape.num_query_heads, shape.scoring)
            for shape in self.shapes.values()
        ]
        if None in variants:
            return "dense"
        return "paged" if all(variant is not None and variant.paged for variant in variants) else "gathered"

    def check(self, config: Any) -> None:
        """Refuse a model whose layers do not attend as its config declares; a ModelLoadError names the first
        difference."""
        text = config.get_text_config(decoder=True)
        types = getattr(text, "layer_types", None)
        if not self.shapes and self.recurrence is None:
            raise ModelLoadError(
                f"no layer of {text.model_type!r} calls transformers' attention interface; "
                "models with attention of their own cannot be served"
            )
        windows = [shape.scoring.sliding_window for shape in self.shapes.values()]
        expected = getattr(text, "num_hidden_layers", len(windows))
        if types is not None:
            expected = sum(kind in ATTENTION_TYPES for kind in types[:expected])
        if len(windows) < expected:
            raise ModelLoadError(f"{len(windows)} of {expected} layers call the attention interface")
        _check_windows(text, windows)


def _check_windows(config: Any, windows: Sequence[int | None]) -> None:
    """A window that exists only in the model's mask would be lost: the layer must pass it on."""
    if getattr(config, "attention_chunk_size", None):
        raise ModelLoadError("chunked attention is not supported")
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        declared = getattr(config, "sliding_window", None)
        if declared and getattr(config, "use_sliding_window", True) and not any(windows):
            raise ModelLoadError(f"the sliding window of {declared} does not reach the attention layers")
        return
    attending = [(index, kind) for index, kind in enumerate(layer_types) if kind in ATTENTION_TYPES]
    for (index, layer_type), window in zip(attending, windows, strict=False):
        if ("sliding" in layer_type) != (window is not None):
            raise ModelLoadError(f"layer {index} is {layer_type!r} but its window is {window}")
