"""Tiny block drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from specwire.engine.model.block import BlockRunner
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


def save_markov_pair(directory: Path, *, is_hostile: bool = False) -> tuple[Path, Path]:
    """A target as `pairs.markov_model`, and a drafter of it.

    At each place of a block the drafter has the target's distribution after the last token: right at the
    first place. A hostile one likes best what the target likes least.
    """
    target = markov_model()
    with torch.no_grad():
        mask = unreached(markov_logits(target))[0]
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
    return save(target, directory / "target"), save(drafter, directory / "drafter")


def drafted(runner: BlockRunner, cache: Any, token_id: int, num: int) -> list[int]:
    """Greedy drafts after a token that follows the cache, which keeps its length."""
    length = cache.length
    states = runner.draft([cache], [token_id])
    cache.truncate(length)
    found: list[int] = runner.logits(states[0, 1:]).argmax(dim=-1).tolist()
    return found[:num]


def unreached(logits: Tensor) -> list[int]:
    """The tokens that greedy text after `PROMPT` does not have."""
    reached, token_id = set(), PROMPT[-1]
    while token_id not in reached:
        reached.add(token_id)
        token_id = int(logits[token_id].argmax())
    return sorted({*range(MARKOV_VOCAB_SIZE)} - reached)
