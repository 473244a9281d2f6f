"""Heads for tiny targets, fitted in a second: they guess well, or as badly as they can."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specwire.engine.heads import files
from specwire.engine.heads.files import HeadsConfig
from specwire.engine.heads.model import Head
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.loading import load_model
from tools.heads.fit import Inputs, fit
from tools.heads.states import run_text
from tools.training import Kept

NUM_HEADS, NUM_FEATURES = 2, 128
NUM_TOKENS = 2048


def save_heads(directory: Path, target: Path, *, is_hostile: bool = False) -> Path:
    """Heads of a saved target, on tokens at random; hostile ones like best what good ones like least."""
    model = load_model(target, dtype="float32")
    model.set_attn_implementation("eager")
    model.requires_grad_(False)
    directory.mkdir(parents=True)
    token_ids = np.random.default_rng(0).integers(model.config.vocab_size, size=NUM_TOKENS)
    states = run_text(model, token_ids, Kept(directory, "random"), lambda _: None)
    inputs = Inputs(token_ids, states, model.get_input_embeddings(), NUM_HEADS)
    heads: list[Head] = []
    while len(heads) < NUM_HEADS:
        heads.append(fit(inputs, heads, NUM_FEATURES, lambda _: None))
    if is_hostile:
        heads = [head._replace(out=-head.out, out_bias=-head.out_bias) for head in heads]
    config = HeadsConfig(
        target=target.name,
        target_fingerprint=weights_fingerprint(target),
        num_heads=len(heads),
        state_size=states.shape[1],
        embedding_size=heads[0].up.shape[1] - states.shape[1],
        num_features=NUM_FEATURES,
    )
    files.save(directory, config, {k: w for i, head in enumerate(heads) for k, w in head.named(i).items()})
    return directory
