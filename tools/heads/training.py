"""`specwire train-heads`: from a target and a text to heads, in steps that survive an interruption."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from specwire.engine.heads import files
from specwire.engine.heads.files import HeadsConfig
from specwire.engine.heads.model import Head, TargetModules
from tools.drafts import Bar, TrainHeadsConfig
from tools.heads.fit import Inputs, fit
from tools.heads.states import WINDOW, run_text
from tools.training import Kept, descend, prepared

_FITTED = "heads.pt"
_BATCH = 256
_RATE, _WARMUP_STEPS = 5e-4, 20


def train(config: TrainHeadsConfig, bar: Bar) -> HeadsConfig:
    """Train heads and write them; goes on with what an interrupted training has left. Errors as of
    `prepared`."""
    model, token_ids, fingerprint, kept = prepared(config, WINDOW)
    target = TargetModules.of(model)
    with bar("states", len(token_ids)) as advance:
        states = run_text(model, token_ids, kept, advance)
    inputs = Inputs(token_ids, states, target.embedding, config.num_heads)
    state_size = states.shape[1]
    num_features = config.num_features or state_size
    kept = kept.narrowed(config.num_heads, num_features)
    heads = _fitted(inputs, config.num_heads, num_features, kept, bar)
    if config.steps:
        heads = _descended(inputs, heads, target.output, config.steps, kept.narrowed(config.steps), bar)
    made = HeadsConfig(
        target=Path(config.target).name,
        target_fingerprint=fingerprint,
        num_heads=len(heads),
        state_size=state_size,
        embedding_size=heads[0].up.shape[1] - state_size,
        num_features=num_features,
    )
    weights = [head.named(number) for number, head in enumerate(heads)]
    files.save(Path(config.out), made, {name: weight for named in weights for name, weight in named.items()})
    shutil.rmtree(kept.directory)
    return made


def _fitted(inputs: Inputs, num_heads: int, num_features: int, kept: Kept, bar: Bar) -> list[Head]:
    """All heads in closed form; those that are kept already are not fitted again."""
    heads = [Head(*head) for head in kept.load(_FITTED).get("heads", ())]
    with bar("closed form", num_heads * len(inputs.index)) as advance:
        advance(len(heads) * len(inputs.index))
        while len(heads) < num_heads:
            heads.append(fit(inputs, heads, num_features, advance))
            kept.save(_FITTED, {"heads": [tuple(head) for head in heads]})
    return heads


def _descended(
    inputs: Inputs, fitted: Sequence[Head], output: Any, num_steps: int, kept: Kept, bar: Bar
) -> list[Head]:
    """Heads after so many steps of AdamW.

    Args:
        output: the target's module from states to logits; it does not change.
    """
    heads = [Head(*(weight.clone().requires_grad_() for weight in head)) for head in fitted]
    weights = [weight for head in heads for weight in head]

    def loss_at(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        picked = torch.randint(len(inputs.index), (_BATCH,), generator=generator)
        return _loss(inputs, heads, output, inputs.index[picked])

    def rate_at(step: int) -> float:
        return _RATE * min(1.0, (step + 1) / _WARMUP_STEPS) * (1 - step / num_steps)

    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0)
    with bar("steps", num_steps) as advance:
        descend([optimizer], loss_at, rate_at, num_steps, kept, advance)
    return [Head(*(weight.detach() for weight in head)) for head in heads]


def _loss(inputs: Inputs, heads: Sequence[Head], output: Any, index: Tensor) -> Tensor:
    """Mean cross entropy to the target's distributions, in nats."""
    states, losses = inputs.states(index), []
    for depth, head in enumerate(heads):
        states = head(torch.cat([states, inputs.embeddings(index, depth)], dim=-1))
        with torch.no_grad():
            wanted = output(inputs.states(index + depth + 1)).softmax(dim=-1)
        losses.append(F.cross_entropy(output(states), wanted))
    return torch.stack(losses).mean()
