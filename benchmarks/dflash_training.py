"""A block drafter for the embedded target, trained here (DFlash, arXiv 2602.06036).

From the target's states before a place it learns the target's distributions at the places of a block, all at
once: what follows the block's first token, whatever the tokens between are.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)
from transformers.cache_utils import DFlashCache

from benchmarks.embedded import train as training
from specwire import embedded

BLOCK_SIZE = 8
_WINDOW = 256
_LEAST_CONTEXT = 16
_PLACES_A_STEP = 8
_LEARNING_RATE = 2e-3
_LAYERS = (1, 3, 5)


def make(directory: Path, seconds: float) -> None:
    """Write a drafter that was trained for so long."""
    torch.manual_seed(0)
    target = LlamaForCausalLM.from_pretrained(embedded.TARGET_DIR, dtype=torch.float32).requires_grad_(False)
    drafter = untrained(target.config)
    rng = random.Random(0)
    rows = training.library_rows(rng)

    def next_loss(progress: float) -> Tensor:
        tokens = training.random_windows(rows, _WINDOW, rng)
        places = [rng.randrange(_LEAST_CONTEXT, _WINDOW - BLOCK_SIZE) for _ in range(_PLACES_A_STEP)]
        return _loss(target, drafter, tokens, places, training.distillation_share(progress))

    training.fit(
        "dflash", training.Optimizer(drafter, _LEARNING_RATE, inner=""), training.Budget(seconds), next_loss
    )
    drafter.eval().save_pretrained(directory)


def untrained(of: Any) -> Any:
    """Two layers of the target's width, whose mask is the target's last token id."""
    config = MuseGlimmerAssistantConfig(
        hidden_size=of.hidden_size,
        intermediate_size=of.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=of.num_key_value_heads,
        head_dim=of.head_dim,
        max_position_embeddings=of.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        layer_types=["full_attention"] * 2,
        block_size=BLOCK_SIZE,
        mask_token_id=of.vocab_size - 1,
        target_layer_ids=list(_LAYERS),
    )
    return MuseGlimmerAssistantModel(config)


def _loss(target: Any, drafter: Any, tokens: Tensor, places: list[int], share: Tensor) -> Tensor:
    """Mean of `distillation_loss` over blocks that begin at these places of all windows."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            output = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
            states = torch.cat([output.hidden_states[number + 1] for number in _LAYERS], dim=-1)
        losses = []
        for place in places:
            block = torch.full((len(tokens), BLOCK_SIZE), drafter.config.mask_token_id)
            block[:, 0] = tokens[:, place]
            cache = DFlashCache(config=drafter.config)
            cache.set_previous_accepted_tokens(place)
            drafted = drafter(
                noise_embeds=target.get_input_embeddings()(block),
                context_hidden_states=states[:, :place],
                position_ids=torch.arange(place + BLOCK_SIZE)[None],
                past_key_values=cache,
            ).last_hidden_state
            wanted = output.logits[:, place : place + BLOCK_SIZE - 1]
            losses.append(training.distillation_loss(wanted, target.lm_head(drafted[:, 1:]), share))
    return torch.stack(losses).mean()
