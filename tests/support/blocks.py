"""Tiny block drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from tests.support.tiny_models import VOCAB_SIZE, WINDOW

BLOCK_SIZE = 5


def save_block_drafter(directory: Path, **overrides: Any) -> Path:
    """For a tiny target of two layers, of which it reads the first and what comes out at the end."""
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
    model.save_pretrained(directory)
    return directory
