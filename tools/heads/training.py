"""`specwire train-heads`: from a target and a text to heads, in steps that survive an interruption."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specwire import embedded
from specwire.config.models import EMBEDDED
from specwire.engine.boot import model_directory
from specwire.engine.heads import files
from specwire.engine.heads.files import HeadsConfig
from specwire.engine.heads.model import Head, TargetModules
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.loading import errors_naming, load_weights, read_config
from specwire.errors import ConfigError
from specwire.support import IntArray
from specwire.text import tokenizer
from tools.drafts import Bar, TrainHeadsConfig, TrainingConfig
from tools.files import read_text
from tools.heads.descent import descend
from tools.heads.fit import Inputs, fit
from tools.heads.states import WINDOW, Kept, run_text

_PARTIAL = "training"
"""What is kept in case of an interruption, in the heads' directory; removed at the end."""

_FITTED = "heads.pt"
_CHARS = 16
"""Of the text that are encoded for each token that is wanted."""


def train(config: TrainHeadsConfig, bar: Bar) -> HeadsConfig:
    """Train heads and write them; goes on with what an interrupted training has left.

    Raises:
        ConfigError: the text is too short, or is no UTF-8.
        ModelLoadError: the target cannot be loaded, or has no tokenizer.
    """
    model, token_ids, fingerprint = prepared(config, WINDOW)
    target = TargetModules.of(model)
    out = Path(config.out)
    partial = out / _PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    kept = Kept(partial, f"{fingerprint} {text_name(token_ids)}")
    with bar("states", len(token_ids)) as advance:
        text = run_text(model, token_ids, kept, advance)
    inputs = Inputs(text, target.embedding, config.num_heads)
    num_features = config.num_features or text.states.shape[1]
    kept = Kept(partial, f"{kept.name} {config.num_heads} {num_features}")
    heads = _fitted(inputs, config.num_heads, num_features, kept, bar)
    if config.steps:
        kept = Kept(partial, f"{kept.name} {config.steps}")
        with bar("steps", config.steps) as advance:
            num_steps, output = config.steps, target.output
            heads = descend(inputs, heads, output, num_steps=num_steps, kept=kept, advance=advance)
    made = HeadsConfig(
        target=Path(config.target).name,
        target_fingerprint=fingerprint,
        num_heads=len(heads),
        state_size=text.states.shape[1],
        embedding_size=heads[0].up.shape[1] - text.states.shape[1],
        num_features=num_features,
    )
    weights = [head.named(number) for number, head in enumerate(heads)]
    files.save(out, made, {name: weight for named in weights for name, weight in named.items()})
    shutil.rmtree(partial)
    return made


def prepared(config: TrainingConfig, least: int) -> tuple[Any, IntArray, str]:
    """The target, the text's tokens (int64 [num_tokens]) and the fingerprint of the target's weights.

    Args:
        least: tokens that the text must have.

    Raises:
        ConfigError, ModelLoadError: see `train`.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    source = str(embedded.TARGET_DIR) if config.target == EMBEDDED else config.target
    loaded = tokenizer.load(source)
    if loaded is None:
        raise ConfigError(f"--target {config.target}: has no tokenizer")
    text = read_text("--text", config.text)
    token_ids = np.array(loaded.encode(text[: _CHARS * config.tokens])[: config.tokens], np.int64)
    if len(token_ids) < least:
        raise ConfigError(f"--text {config.text}: {len(token_ids)} tokens are too few; needs {least}")
    with errors_naming(source):  # the target in float32 on the CPU, as transformers runs it
        read_config(source)
        model = load_weights(source, "float32")
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        model.requires_grad_(False)
    return model, token_ids, weights_fingerprint(model_directory(source))


def _fitted(inputs: Inputs, num_heads: int, num_features: int, kept: Kept, bar: Bar) -> list[Head]:
    """All heads in closed form; those that are kept already are not fitted again."""
    heads = [Head(*head) for head in kept.load(_FITTED).get("heads", ())]
    with bar("closed form", num_heads * len(inputs.index)) as advance:
        advance(len(heads) * len(inputs.index))
        while len(heads) < num_heads:
            heads.append(fit(inputs, heads, num_features, advance))
            kept.save(_FITTED, {"heads": [tuple(head) for head in heads]})
    return heads


def text_name(token_ids: IntArray) -> str:
    """Of a text, by its content."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).hexdigest()
