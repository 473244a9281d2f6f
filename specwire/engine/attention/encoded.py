"""Attention of encoder-decoders: an encoder's to its input, and a decoder's to its own keys and the input's.

    slots of a sequence   | input of the encoder | tokens of the decoder |
    decoder layer           cross-attention reads   self-attention reads

Both attentions of a decoder layer have keys of the same shape, so one cache serves both: a page belongs to a
sequence, whether it holds input or output, and forks share either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from specwire.engine.attention import views
from specwire.engine.attention.paged import PackedBatch
from specwire.engine.attention.probe import Probe
from specwire.engine.cache.layer_cache import LayerCache, Scoring
from specwire.errors import ModelLoadError, UnsupportedError


class EncoderPass:
    """What attends in an encoder that reads one input: every token sees all others."""

    takes_bias: ClassVar = True

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `Attend`; an UnsupportedError where a layer scores in a way that is not implemented here."""
        for name in ("sliding_window", "softcap", "sinks"):
            if getattr(scoring, name) is not None:
                raise UnsupportedError(name, "given", "not implemented for encoders")
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=scoring.bias, scale=scoring.scale
        )
        return output[0].transpose(0, 1)


@dataclass
class DecoderBatch(PackedBatch):
    """One step of a decoder.

    Attributes:
        cross: by module of a cross-attention, the cache of its layer, which is in `layers` too.
        input_slots: int64, where keys and values of the inputs encoded for this step are written.
    """

    takes_bias: ClassVar = True

    cross: dict[nn.Module, LayerCache] = field(kw_only=True)
    input_slots: Tensor = field(kw_only=True)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`. Of a cross-attention, the keys are those of the new inputs, or none."""
        layer = self.cross.get(module)
        if layer is None:
            return super().attend(module, query, key, value, scoring)
        if len(self.input_slots):
            layer.write(self.input_slots, key, value)
        return views.view_attention(self._input_plan, layer, query, scoring)

    @cached_property
    def _input_plan(self) -> views.ReadPlan:
        return views.plan_inputs(self.segments, self.input_slots.device)


class DecoderProbe(Probe):
    """Finds the layers of a decoder in a pass of one token, with an input of more tokens than that.

    Attributes:
        cross: by module of a cross-attention, that of the self-attention whose cache it shares.
    """

    takes_bias: ClassVar = True

    def __init__(self) -> None:
        super().__init__()
        self.cross: dict[nn.Module, nn.Module] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`; the result of a cross-attention is the value of the last token."""
        if len(key) == len(query):
            return super().attend(module, query, key, value, scoring)
        name, own = type(module).__name__, next(reversed(self.shapes), None)
        if own is None or own in self.cross.values():
            raise ModelLoadError(f"{name} reads the input without a self-attention before it")
        shape = self.shapes[own]
        if shape.key.shape != key.shape[1:] or shape.value.shape != value.shape[1:]:
            raise ModelLoadError(f"{name} has keys of another shape than the self-attention before it")
        self.cross[module] = own
        return value[-1:]

    def check(self, config: object) -> None:
        """Refuse, with a ModelLoadError, a decoder that does not read its input in every layer."""
        if not self.shapes or len(self.cross) != len(self.shapes):
            raise ModelLoadError(
                f"{len(self.shapes)} self-attentions and {len(self.cross)} cross-attentions call "
                "transformers' attention interface"
            )
