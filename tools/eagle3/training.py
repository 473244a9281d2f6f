"""`specwire train-eagle3`: from a target and a text to an EAGLE-3, in SafeAILab's layout.

The target runs windows of the text, and the EAGLE-3 learns its distributions (`unrolled`). Embeddings are the
target's; the output layer begins as the target's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig

from specwire.config.cpu import is_native
from specwire.engine.heads.files import replace_file
from specwire.engine.model.drafter import bare_rows
from specwire.engine.model.eagle3 import READ, Eagle3, read_settings
from tools.drafts import Bar, TrainEagle3Config
from tools.eagle3.unrolled import loss_of
from tools.training import Kept, descend, prepared

_WINDOW, _NUM_WINDOWS = 128, 16
"""Tokens of a step."""
_RATE, _WARMUP = 2e-3, 0.02


def train(config: TrainEagle3Config, bar: Bar) -> Path:
    """Train an EAGLE-3 and write it; returns its directory. Errors as of `prepared`."""
    model, text, _, kept = prepared(config, _WINDOW)
    made = layer_config(model, config.draft_vocab_size)
    counts = np.bincount(text, minlength=made["vocab_size"])
    most_frequent = np.sort(np.argsort(-counts, kind="stable")[: made["draft_vocab_size"]])
    drafter = untrained(model, made, torch.from_numpy(most_frequent.astype(np.int64)))
    kept = kept.narrowed(config.depth, config.steps, made["draft_vocab_size"])
    _fit(model, drafter, torch.from_numpy(text), config, kept, bar)
    tensors = {
        name.replace("layer.", "midlayer.", 1): weight.detach() for name, weight in drafter.named_parameters()
    }
    tensors["d2t"] = drafter.target_ids - torch.arange(len(drafter.target_ids))
    tensors["t2d"] = torch.isin(torch.arange(made["vocab_size"]), drafter.target_ids)
    out = Path(config.out)
    replace_file(out / "model.safetensors", save(tensors, {"format": "pt"}))
    replace_file(out / "config.json", json.dumps(made, indent=2).encode())
    shutil.rmtree(kept.directory)
    return out


def layer_config(model: Any, draft_vocab_size: int) -> dict[str, Any]:
    """One Llama layer as wide as the target, reading three of its states."""
    text = model.config.get_text_config(decoder=True)
    size, num_layers, num_heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    deep = (2, num_layers // 2, num_layers - 3)
    read = deep if num_layers > 6 else (min(1, num_layers - 1), num_layers // 2, num_layers - 1)
    made: dict[str, Any] = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        hidden_size=size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * size,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "head_dim", None) or size // num_heads,
        vocab_size=text.vocab_size,
        rms_norm_eps=1e-6,
        max_position_embeddings=getattr(text, "max_position_embeddings", 2048),
        tie_word_embeddings=False,
        dtype="float32",
    ).to_dict()
    most = min(draft_vocab_size or text.vocab_size, text.vocab_size)
    read_ids = sorted(set(read))
    after = {READ: [number - 1 for number in read_ids if number]}  # the same, as other engines read it there
    return made | {"draft_vocab_size": most, READ: read_ids, "eagle_config": after}


def untrained(model: Any, made: dict[str, Any], target_ids: Tensor) -> Eagle3:
    """At random, with the target's output layer for these tokens; `made` as of `layer_config`."""
    torch.manual_seed(0)
    settings = read_settings(made, model.config.get_text_config(decoder=True))
    drafter = Eagle3(settings, has_embedding=False)
    drafter.target_ids, drafter.embedding = target_ids, bare_rows(model.get_input_embeddings())
    with torch.no_grad():
        drafter.lm_head.weight.copy_(model.get_output_embeddings().weight[target_ids])
    return drafter


def _fit(model: Any, drafter: Eagle3, text: Tensor, config: TrainEagle3Config, kept: Kept, bar: Bar) -> None:
    """All steps: matrices by Muon, which computes in bfloat16 and is left out where the processor does not;
    the rest by AdamW."""
    is_fast, inside, others = is_native("bfloat16"), list[Tensor](), list[Tensor]()
    for name, each in drafter.named_parameters():
        is_inside = is_fast and each.ndim == 2 and "lm_head" not in name
        (inside if is_inside else others).append(each)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01)
    ]
    if inside:
        optimizers.insert(0, torch.optim.Muon(inside, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))

    def loss_at(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_fast):
            return loss_of(model, drafter, _windows(text, step), config.depth)

    def rate_at(step: int) -> float:
        progress = step / config.steps
        return _RATE * min(1.0, (progress + 1e-3) / _WARMUP, 2 * (1 - progress))

    with bar("steps", config.steps) as advance:
        descend(optimizers, loss_at, rate_at, config.steps, kept, advance)


def _windows(text: Tensor, step: int) -> Tensor:
    """Those of a step, int64 [_NUM_WINDOWS, _WINDOW]."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - _WINDOW + 1, (_NUM_WINDOWS,), generator=generator)
    return text[starts[:, None] + torch.arange(_WINDOW)]
