"""Saved pairs of tiny models: a target, and drafts that guess well or as badly as they can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support import tiny_models

MARKOV_VOCAB_SIZE = 16


def save_target(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A tiny random target."""
    return tiny_models.save(tiny_models.build(family, seed, **overrides), directory)


def save_good_draft(
    directory: Path, family: str = "llama", seed: int = 0, noise: float = 0.02, **overrides: Any
) -> Path:
    """The target with noise on its weights: mostly right."""
    model = tiny_models.build(family, seed, **overrides)
    tiny_models.add_noise(model, noise, seed + 1)
    return tiny_models.save(model, directory)


def save_hostile_draft(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """The target with its logits negated: likes best what the target likes least."""
    model = tiny_models.build(family, seed, **overrides)
    with torch.no_grad():
        for weight in model.get_output_embeddings().parameters():
            weight.neg_()
    return tiny_models.save(model, directory)


def markov_model(scale: float = 1.0, shift: int = 0, num_layers: int = 1) -> PreTrainedModel:
    """A model whose distribution depends on the last token alone: attention and MLP write nothing.

    Args:
        scale: of the logits; negative makes the hostile draft of the model with the positive scale.
        shift: each token has the logit of the one so many ids before it.
    """
    model = tiny_models.build(
        "llama",
        seed=5,
        vocab_size=MARKOV_VOCAB_SIZE,
        num_hidden_layers=num_layers,
        max_position_embeddings=4096,
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(scale * model.lm_head.weight.roll(shift, 0))
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model


def save_markov_pair(directory: Path, scale: float, shift: int = 0) -> tuple[Path, Path]:
    """A `markov_model`, and as its draft one with this scale and shift."""
    target = tiny_models.save(markov_model(), directory / "target")
    return target, tiny_models.save(markov_model(scale, shift), directory / "draft")


def markov_logits(model: PreTrainedModel) -> torch.Tensor:
    """float32 [vocab_size, vocab_size]: row a holds the logits after token a."""
    with torch.inference_mode():
        tokens = torch.arange(MARKOV_VOCAB_SIZE)[:, None]
        return model(input_ids=tokens, use_cache=False).logits[:, -1].float()


def logits_of(directory: Path) -> torch.Tensor:
    """`markov_logits` of a saved model."""
    return markov_logits(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
