"""A pass of a small model by the operations that it needs, without what transformers does around them.

A model of a few million parameters spends most of a pass on a CPU between its products: in masks, in keyword
arguments, in norms of six operations and rotations of nine. Here the layers of a Llama are run by a loop of
our own; linear layers and embeddings are the model's, packed, sharded or with adapters. On a GPU passes are
captured, and in half precision norms and rotations would be rounded otherwise than by transformers.

One thread of a Xeon, one token, five, and sixteen sequences: the embedded target took 2.8, 4.7 and 10.6 ms
instead of 4.1, 6.3 and 12.9, the draft 1.05, 1.8 and 3.0 instead of 1.68, 2.5 and 3.8. With weights by input
(`packing.py`) and heads by token it is 2.4, 3.0 and 7.4, and 1.0, 1.2 and 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specwire.engine.attention.paged import Attend
from specwire.engine.cache.layer_cache import Scoring

_MODEL = "transformers.models.llama.modeling_llama", "LlamaForCausalLM"
_CHANGING = ("dynamic", "longrope")
"""Rotations that depend on the length of the text."""


def can_run(model: Any) -> bool:
    """Whether `DirectPass` computes what this model does: nothing else is to see or to change its states."""
    kind = type(model)
    return (
        (kind.__module__, kind.__name__) == _MODEL
        and (model.device.type, model.dtype) == ("cpu", torch.float32)
        and model.model.rotary_emb.rope_type not in _CHANGING
        and not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    )


class DirectPass:
    """Passes of a model; see `can_run`."""

    def __init__(self, model: Any, scorings: Mapping[nn.Module, Scoring], num_positions: int) -> None:
        """Args:
        scorings: of its attention modules.
        num_positions: that sequences may have.
        """
        decoder = model.model
        self._embed, self._head = decoder.embed_tokens.forward, model.lm_head.forward
        layers = decoder.layers[: model.config.num_hidden_layers]
        self._layers = [_Layer(layer, scorings[layer.self_attn]) for layer in layers]
        self._norm = _Norm(decoder.norm)
        cos, sin = decoder.rotary_emb(torch.empty(1), torch.arange(num_positions)[None])
        self._cos, self._sin = cos[0], sin[0]  # [num_positions, head_dim]
        self._sin[:, : sin.shape[-1] // 2] *= -1  # half of what it multiplies has the other sign

    def logits(self, packed: Attend, token_ids: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """As `ModelRunner._logits`."""
        states: Tensor = self._embed(token_ids)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for layer in self._layers:
            states = layer.after(states, cos, sin, packed)
        return self._head(self._norm(states if rows is None else states[rows]))  # type: ignore[no-any-return]


class _Layer:
    def __init__(self, layer: Any, scoring: Scoring) -> None:
        attending, mlp = layer.self_attn, layer.mlp
        self._attending, self._scoring, self._head_dim = attending, scoring, attending.head_dim
        self._norms = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        read = attending.q_proj, attending.k_proj, attending.v_proj
        self._query, self._key, self._value = (each.forward for each in read)
        self._output, self._down = attending.o_proj.forward, mlp.down_proj.forward
        self._gate, self._up, self._activation = (
            mlp.gate_proj.forward,
            mlp.up_proj.forward,
            mlp.act_fn.forward,
        )

    def after(self, states: Tensor, cos: Tensor, sin: Tensor, packed: Attend) -> Tensor:
        """[num_tokens, hidden_size] after the layer."""
        read, num_tokens = self._norms[0](states), len(states)
        projected = self._query(read), self._key(read), self._value(read)
        query, key, value = (each.view(num_tokens, -1, self._head_dim) for each in projected)
        query, key = _turned(query, cos, sin), _turned(key, cos, sin)
        attended = packed.attend(self._attending, query, key, value, self._scoring)
        states = states + self._output(attended.reshape(num_tokens, -1))
        read = self._norms[1](states)
        return states + self._down(self._activation(self._gate(read)).mul_(self._up(read)))  # type: ignore[no-any-return]


class _Norm:
    """By the root mean square; torch's own function takes half as long again on a CPU."""

    def __init__(self, norm: Any) -> None:
        self._norm, self._share = norm, 1 / len(norm.weight)
        self._epsilon = torch.tensor([[norm.variance_epsilon]])

    def __call__(self, states: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        variance = torch.addcmul(self._epsilon, length, length, value=self._share)
        return (states * variance.rsqrt_()).mul_(self._norm.weight)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[num_tokens, num_heads, head_dim] with each half of the dimensions rotated against the other."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)
