"""Tiny EAGLE-3 files in both layouts, and what they compute, step by step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu
from transformers import AutoModelForCausalLM

from tests.support.blocks import unreached
from tests.support.pairs import MARKOV_VOCAB_SIZE, markov_logits, markov_model
from tests.support.tiny_models import VOCAB_SIZE, save

SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 2, 8, 48
EPS, THETA = 1e-6, 1e4
LAYOUTS = ("safeailab", "speculators")
NEWER: dict[str, Any] = {
    "norm_before_residual": True,
    "fc_norm": True,
    "norm_before_fc": True,
    "norm_output": True,
}
"""What some of speculators' files ask for."""
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "use_sliding_window": True,
    "layer_types": ["sliding_attention"],
    "sliding_window": 4,
}
"""Of a layer that normalises its queries and keys, and sees as many keys."""


def save_eagle3(
    directory: Path,
    layout: str = "safeailab",
    *,
    vocab_size: int = VOCAB_SIZE,
    target_ids: Sequence[int] = (*range(1, VOCAB_SIZE, 2),),
    num_read: int = 2,
    tensors: Mapping[str, Tensor] | None = None,
    without: str = "",
    layer: Mapping[str, Any] | None = None,
    **given: Any,
) -> Path:
    """For a tiny target of two layers, of which it reads the inputs.

    Args:
        tensors: instead of random ones.
        without: a tensor that is left out.
        layer, given: what the config says else, of the layer and of all.
    """
    sizes = {"hidden_size": SIZE, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS}
    sizes |= {"head_dim": HEAD_DIM, "intermediate_size": INTERMEDIATE, "vocab_size": vocab_size}
    config = {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": EPS, "rope_theta": THETA}
    config |= sizes | dict(layer or {})
    read = {"eagle_aux_hidden_state_layer_ids": [*range(num_read)]}
    found = random_tensors(target_ids, num_read, given, layer or {}) | dict(tensors or {})
    found["t2d"] = torch.isin(torch.arange(vocab_size), torch.tensor(target_ids))
    found.pop(without, None)
    directory.mkdir(parents=True)
    given = {"draft_vocab_size": len(target_ids)} | given
    if layout == "safeailab":
        stored = {"architectures": ["LlamaForCausalLM"], **read, **config, **given}
        torch.save(found, directory / "pytorch_model.bin")
    else:
        stored = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **read}
        stored |= {"norm_before_residual": False, "transformer_layer_config": config, **given}
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in found.items()}
        save_file(renamed, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(stored))
    return directory


def random_tensors(
    target_ids: Sequence[int], num_read: int, given: Mapping[str, Any], layer: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Under SafeAILab's names; norms near 1. A layer of Qwen3 comes with embeddings of its own."""
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (SIZE, num_read * SIZE),
        "midlayer.self_attn.q_proj": (heads, 2 * SIZE),
        **{f"midlayer.self_attn.{name}_proj": (kv_heads, 2 * SIZE) for name in "kv"},
        "midlayer.self_attn.o_proj": (SIZE, heads),
        **{f"midlayer.mlp.{name}_proj": (INTERMEDIATE, SIZE) for name in ("gate", "up")},
        "midlayer.mlp.down_proj": (SIZE, INTERMEDIATE),
        **dict.fromkeys(("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"), (SIZE,)),
        "midlayer.post_attention_layernorm": (SIZE,),
        "lm_head": (len(target_ids), SIZE),
    }
    if given.get("norm_before_fc"):
        shapes["input_norm"] = (num_read * SIZE,)
    if given.get("fc_norm"):
        shapes |= {f"fc_norm.{number}": (SIZE,) for number in range(num_read)}
    if layer.get("model_type") == "qwen3":
        shapes |= {f"midlayer.self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"}
        shapes["embed_tokens"] = (VOCAB_SIZE, SIZE)
    generator = torch.Generator().manual_seed(3)
    found = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        + (1 if len(shape) == 1 else 0)
        for name, shape in shapes.items()
    }
    return found | {"d2t": torch.tensor(target_ids) - torch.arange(len(target_ids))}


def save_markov_pair(directory: Path, *, is_hostile: bool = False) -> tuple[Path, Path]:
    """A target as `pairs.markov_model`, and an EAGLE-3 that has its distribution, but for some tokens that
    greedy text does not have. A hostile one likes best what the target likes least.

    It attends to the last token alone, and adds nothing to its embedding.
    """
    target = markov_model()
    target_ids = sorted({*range(MARKOV_VOCAB_SIZE)} - {*unreached(markov_logits(target))[:3]})
    zeros, eye = torch.zeros(SIZE, SIZE), torch.eye(SIZE)
    shown, output = target.model.norm.weight.detach(), target.lm_head.weight.detach()
    tensors = {
        **{f"midlayer.self_attn.{name}_proj.weight": torch.cat([zeros, zeros], dim=1) for name in "qk"},
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, zeros], dim=1),
        "midlayer.self_attn.o_proj.weight": eye,
        "midlayer.mlp.down_proj.weight": torch.zeros(SIZE, INTERMEDIATE),
        "midlayer.hidden_norm.weight": torch.zeros(SIZE),
        "midlayer.input_layernorm.weight": torch.ones(SIZE),
        "norm.weight": -shown if is_hostile else shown.clone(),
        "lm_head.weight": output[target_ids].clone(),
    }
    drafter = save_eagle3(
        directory / "eagle3",
        "speculators",
        vocab_size=MARKOV_VOCAB_SIZE,
        target_ids=target_ids,
        num_read=1,
        tensors=tensors,
        layer={
            "num_key_value_heads": NUM_HEADS,
            "layer_types": ["sliding_attention"],
            "sliding_window": 1,
        },
        norm_before_residual=True,
    )
    return save(target, directory / "target"), drafter


def straight_logits(
    target: Path,
    tensors: Mapping[str, Tensor],
    given: Mapping[str, Any],
    window: int,
    tokens: Sequence[int],
    num: int,
) -> Tensor:
    """Logits [num, draft_vocab_size] after each of the last tokens, of which the target has seen none.

    Args:
        tensors: as of `random_tensors`.
        given: what the config says of norms.
        window: keys that a token sees.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    with torch.inference_mode():
        shown = model(torch.tensor([tokens[:-num]]), output_hidden_states=True).hidden_states

        def norm(x: Tensor, name: str) -> Tensor:
            weight = tensors[f"{name}.weight"]
            return rms_norm(x, weight.shape, weight, EPS)

        read = [shown[i][0] for i in range(tensors["fc.weight"].shape[1] // SIZE)]
        if given.get("fc_norm"):
            read = [norm(x, f"fc_norm.{i}") for i, x in enumerate(read)]
        joined = torch.cat(read, dim=-1)
        joined = norm(joined, "input_norm") if given.get("norm_before_fc") else joined
        states = linear(joined, tensors["fc.weight"])
        found = []
        for _ in range(num):
            embedded = table[torch.tensor(tokens[1 : len(states) + 1])]
            hidden = norm(states, "midlayer.hidden_norm")
            both = torch.cat([norm(embedded, "midlayer.input_layernorm"), hidden], dim=-1)
            x = hidden if given.get("norm_before_residual") else states
            x = x + _attention(both, tensors, window)
            between = norm(x, "midlayer.post_attention_layernorm")
            gate, up, down = (tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = (x + linear(silu(linear(between, gate)) * linear(between, up), down))[-1:]
            found.append(linear(norm(x, "norm"), tensors["lm_head.weight"]))
            states = torch.cat([states, norm(x, "norm") if given.get("norm_output") else x])
    return torch.cat(found)


def _attention(both: Tensor, tensors: Mapping[str, Tensor], window: int) -> Tensor:
    """Causal attention of a whole text, with rotary positions from 0."""
    length = len(both)
    angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turn = torch.polar(torch.ones(angles.shape), angles)

    def heads(name: str, is_turned: bool) -> Tensor:
        x = linear(both, tensors[f"midlayer.self_attn.{name}_proj.weight"])
        x = x.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
        if (weight := tensors.get(f"midlayer.self_attn.{name}_norm.weight")) is not None:
            x = rms_norm(x, weight.shape, weight, EPS)
        if is_turned:  # halves of a head are real and imaginary parts
            turned = torch.complex(*x.chunk(2, dim=-1)) * turn
            x = torch.cat([turned.real, turned.imag], dim=-1)
        return x.repeat_interleave(NUM_HEADS // len(x), dim=0)

    query, key, value = heads("q", True), heads("k", True), heads("v", False)
    scores = query @ key.transpose(1, 2) / HEAD_DIM**0.5
    behind = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (behind < 0) | (behind >= window)
    found = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ value
    return linear(found.transpose(0, 1).flatten(1), tensors["midlayer.self_attn.o_proj.weight"])
