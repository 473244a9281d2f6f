"""Tiny block drafters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu
from transformers import (
    AutoModelForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
)

from tests.support.markov_distribution import PROMPT
from tests.support.pairs import MARKOV_VOCAB_SIZE, markov_logits, markov_model
from tests.support.tiny_models import VOCAB_SIZE, WINDOW, save

BLOCK_SIZE = 5


def save_block_drafter(directory: Path, **overrides: Any) -> Path:
    """For a tiny target of two layers, of which it reads the first and what comes out at the end."""
    save(_drafter(**overrides), directory)
    return directory


def _drafter(**overrides: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MuseGlimmerAssistantConfig(
        **sizes
        | {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": WINDOW, "max_position_embeddings": 512}
        | {"layer_types": ["sliding_attention", "full_attention"], "target_layer_ids": [0, 1]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        | {"block_size": BLOCK_SIZE, "mask_token_id": VOCAB_SIZE - 1}
        | overrides
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = MuseGlimmerAssistantModel(config)
        for weight in model.parameters():
            weight.normal_(1 if weight.ndim == 1 else 0, 1 / max(weight.shape) ** 0.5)
    return model


EPS, THETA, NUM_HEADS, HEAD_DIM = 1e-6, 5e5, 4, 8
DRAFTED = (*range(1, VOCAB_SIZE, 2),)
"""Tokens that `save_published` drafts in speculators' layout."""


def published_tensors(target_ids: Sequence[int] = ()) -> dict[str, Tensor]:
    """Random ones for `save_target`, by published names.

    Args:
        target_ids: those that an output layer of its own has logits of, as in speculators' files.
    """
    size, width, shapes = 32, NUM_HEADS * HEAD_DIM, dict[str, tuple[int, ...]]()
    for layer in ("layers.0", "layers.1"):
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (width // 2, size) for name in "kv"}
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (width, size),
            f"{layer}.mlp.down_proj.weight": (size, 48),
        }
        shapes |= {f"{layer}.self_attn.o_proj.weight": (size, width)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (48, size) for name in ("gate", "up")}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"{layer}.{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
    shapes |= {"fc.weight": (size, 2 * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    if target_ids:
        shapes |= {"lm_head.weight": (len(target_ids), size), "embed_tokens.weight": (VOCAB_SIZE, size)}
    generator = torch.Generator().manual_seed(4)
    return {
        name: torch.randn(*shape, generator=generator) / (max(shape) ** 0.5 if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }


def save_published(directory: Path, layout: str = "z-lab", **overrides: Any) -> Path:
    """A block drafter of `save_target` in files as z-lab's, or as speculators', which needs a target of three
    layers and drafts `DRAFTED`."""
    layers: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "head_dim": HEAD_DIM,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "vocab_size": VOCAB_SIZE,
        "num_key_value_heads": NUM_HEADS // 2,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "attention_bias": False,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    if layout == "speculators":
        tensors, layers = published_tensors(target_ids=DRAFTED), layers | overrides.pop("layers", {})
        return save_speculators(directory, layers, tensors, DRAFTED, **overrides)
    config: dict[str, Any] = {
        **layers,
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": 2,
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1]},
    }
    config["dflash_config"] |= overrides.pop("dflash_config", {})
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | overrides))
    save_file(published_tensors(), directory / "model.safetensors")
    return directory


def save_speculators(
    directory: Path,
    layers: dict[str, Any],
    tensors: Mapping[str, Tensor],
    target_ids: Sequence[int],
    *,
    without: str = "",
    **given: Any,
) -> Path:
    """A block drafter in speculators' files.

    Args:
        layers, given: what the config says of the layers, and else.
        target_ids: of the tokens that `lm_head` has logits of.
        without: a tensor that is left out.
    """
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "target"}},
        "draft_vocab_size": len(target_ids),
        "block_size": BLOCK_SIZE,
        "mask_token_id": 7,
        "aux_hidden_state_layer_ids": [2, 1],
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
    }
    ids = torch.tensor(target_ids)
    t2d = torch.isin(torch.arange(layers["vocab_size"]), ids)
    found = {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    found.pop(without, None)
    directory.mkdir()
    save_file(found, directory / "model.safetensors")
    stored = config | {"transformer_layer_config": layers} | given
    (directory / "config.json").write_text(json.dumps(stored))
    return directory


@torch.inference_mode()
def straight_logits(target: Path, tensors: Mapping[str, Tensor], tokens: Sequence[int], mask: int) -> Tensor:
    """Logits [BLOCK_SIZE, vocab_size] at each place of a block, the last token and masks. The target has not
    seen the last token. With an output layer of the drafter's own the vocabulary is its own."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    shown = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    read = torch.cat([shown[1][0], shown[2][0]], dim=-1)  # what layers 0 and 1 give
    num_before, size = len(tokens) - 1, len(tokens) - 1 + BLOCK_SIZE
    angles = torch.arange(size)[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turn = torch.polar(torch.ones(angles.shape), angles)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, tensors[f"{name}.weight"].shape, tensors[f"{name}.weight"], EPS)

    def heads(x: Tensor, name: str, at: Tensor | None) -> Tensor:
        found = linear(x, tensors[f"{name}_proj.weight"]).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
        if at is not None:  # halves of a head are real and imaginary parts
            turned = torch.complex(*norm(found, f"{name}_norm").chunk(2, dim=-1)) * at
            found = torch.cat([turned.real, turned.imag], dim=-1)
        return found.repeat_interleave(NUM_HEADS // len(found), dim=0)

    context = norm(linear(read, tensors["fc.weight"]), "hidden_norm")
    table = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
    x = table[torch.tensor([tokens[-1], *[mask] * (BLOCK_SIZE - 1)])]
    for layer in ("layers.0", "layers.1"):
        here = norm(x, f"{layer}.input_layernorm")
        both = torch.cat([context, here])
        query = heads(here, f"{layer}.self_attn.q", turn[num_before:])
        key, value = heads(both, f"{layer}.self_attn.k", turn), heads(both, f"{layer}.self_attn.v", None)
        seen = (query @ key.transpose(1, 2) / HEAD_DIM**0.5).softmax(dim=-1) @ value
        x = x + linear(seen.transpose(0, 1).flatten(1), tensors[f"{layer}.self_attn.o_proj.weight"])
        between = norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (tensors[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + linear(silu(linear(between, gate)) * linear(between, up), down)
    return linear(norm(x, "norm"), tensors.get("lm_head.weight", model.get_output_embeddings().weight))


def save_markov_pair(
    directory: Path, *, is_hostile: bool = False, layout: str = "transformers"
) -> tuple[Path, Path]:
    """A target as `pairs.markov_model`, and a drafter of it.

    At each place of a block the drafter has the target's distribution after the last token: right at the
    first place. A hostile one likes best what the target likes least. In speculators' layout it drafts from
    the last token's place on, and lacks some tokens that greedy text does not have.
    """
    is_narrow = layout == "speculators"
    target = markov_model(num_layers=2 if is_narrow else 1)
    with torch.no_grad():
        mask, *others = unreached(markov_logits(target))
        target.model.embed_tokens.weight[mask] = 0  # so that masks add nothing to what the last token does
        drafter = _drafter(
            num_key_value_heads=4,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            target_layer_ids=[0],
            mask_token_id=mask,
            max_position_embeddings=4096,
        )
        [layer] = drafter.layers
        attention, shown = layer.self_attn, target.model.norm.weight
        for weight in (attention.q_norm.weight, drafter.encoder.output_norm_enc.weight):
            weight.zero_()  # all tokens are attended to alike, and the context says nothing
        for weight in (attention.v_proj.weight, attention.o_proj.weight):
            weight.copy_(torch.eye(len(weight)))
        layer.input_layernorm.weight.fill_(1)
        layer.mlp.down_proj.weight.zero_()
        drafter.norm.weight.copy_(-shown if is_hostile else shown)
        saved = save(target, directory / "target")
        if not is_narrow:
            return saved, save(drafter, directory / "drafter")
        ids = sorted({*range(MARKOV_VOCAB_SIZE)} - {*others[:3]})
        tensors = {
            name.replace("encoder.fc", "fc").replace("encoder.output_norm_enc", "hidden_norm"): each
            for name, each in drafter.state_dict().items()
        }
        tensors["lm_head.weight"] = target.lm_head.weight[ids]
        tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.clone()
    layers: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": MARKOV_VOCAB_SIZE,
        "layer_types": ["full_attention"],
    }
    sizes = ("hidden_size", "head_dim", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    for name in (*sizes, "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters"):
        layers[name] = getattr(drafter.config, name)
    named: dict[str, Any] = {
        "mask_token_id": mask,
        "aux_hidden_state_layer_ids": [1],
        "sample_from_anchor": True,
    }
    return saved, save_speculators(directory / "drafter", layers, tensors, ids, **named)


def unreached(logits: Tensor) -> list[int]:
    """The tokens that greedy text after `PROMPT` does not have."""
    reached, token_id = set(), PROMPT[-1]
    while token_id not in reached:
        reached.add(token_id)
        token_id = int(logits[token_id].argmax())
    return sorted({*range(MARKOV_VOCAB_SIZE)} - reached)
