"""A pass of a small model by the operations that it needs, without what transformers does around them.

A model of a few million parameters spends most of a pass on a CPU between its products: in masks, in keyword
arguments, in norms of six operations and rotations of nine. Here the layers of a Llama, and of models built
like it, are run by a loop of our own; linear layers and embeddings are the model's, packed, sharded or with
adapters. In half precision each step is rounded as transformers rounds it, so that logits are the same bits.
On a GPU passes are captured.

One thread of a Xeon, one token, five, and sixteen sequences: the embedded target took 2.8, 4.7 and 10.6 ms
instead of 4.1, 6.3 and 12.9, the draft 1.05, 1.8 and 3.0 instead of 1.68, 2.5 and 3.8. With weights by input
(`packing.py`) and heads by token it is 2.4, 3.0 and 7.4, and 1.0, 1.2 and 2.3. With 252 million parameters in
bfloat16 two threads of an AMD EPYC take 16.3, 17.4 and 41 ms instead of 18.4, 19.4 and 44.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specwire.engine.attention.paged import Attend
from specwire.engine.cache.layer_cache import Scoring

_MODELS = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
_DTYPES = torch.float32, torch.bfloat16, torch.float16
_CHANGING = ("dynamic", "longrope")
"""Rotations that depend on the length of the text."""


def can_run(model: Any) -> bool:
    """Whether `DirectPass` computes what this model does: nothing else is to see or to change its states."""
    kind = type(model)
    return (
        f"{kind.__module__}.{kind.__name__}" in _MODELS
        and model.device.type == "cpu"
        and model.dtype in _DTYPES
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
        cos, sin = decoder.rotary_emb(torch.empty(1, dtype=model.dtype), torch.arange(num_positions)[None])
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
        names = ("q_norm", "k_norm") if hasattr(attending, "q_norm") else ()
        self._head_norms = [_Norm(getattr(attending, name)) for name in names]
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
        if self._head_norms:
            query, key = (norm(each) for norm, each in zip(self._head_norms, (query, key), strict=True))
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
        if states.dtype != torch.float32:  # rounded where transformers rounds
            exact = states.float()
            scale = exact.square().mean(dim=-1, keepdim=True).add_(self._epsilon).rsqrt_()
            return exact.mul_(scale).to(states.dtype).mul_(self._norm.weight)
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        variance = torch.addcmul(self._epsilon, length, length, value=self._share)
        return (states * variance.rsqrt_()).mul_(self._norm.weight)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[num_tokens, num_heads, head_dim] with each half of the dimensions rotated against the other."""
    rolled = heads.roll(heads.shape[-1] // 2, -1)
    if heads.dtype != torch.float32:  # each product is rounded
        return (heads * cos).add_(rolled.mul_(sin))
    return torch.addcmul(heads * cos, rolled, sin)
