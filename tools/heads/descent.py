"""Gradient steps on heads: towards the target's own distributions, along the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from specwire.engine.heads.model import Head
from tools.drafts import Advance
from tools.heads.fit import Inputs
from tools.heads.states import Kept

_BATCH = 256
_RATE, _WARMUP_STEPS = 5e-4, 20
_SAVE_STEPS = 50
_FILE = "steps.pt"


def descend(
    inputs: Inputs, heads: Sequence[Head], output: Any, *, num_steps: int, kept: Kept, advance: Advance
) -> list[Head]:
    """Heads after so many steps of AdamW, those before an interruption included.

    Args:
        output: the target's module from states to logits; it does not change.
        kept: what an interrupted training has left; steps under another name are not used.
        advance: told of steps.
    """
    weights = [Head(*(weight.clone().requires_grad_() for weight in head)) for head in heads]
    parameters = [weight for head in weights for weight in head]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    num_done = 0
    if before := kept.load(_FILE):
        with torch.no_grad():
            for parameter, saved in zip(parameters, before["parameters"], strict=True):
                parameter.copy_(saved)
        optimizer.load_state_dict(before["optimizer"])
        num_done = before["step"]
    advance(num_done)
    for step in range(num_done, num_steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARMUP_STEPS) * (1 - step / num_steps)
        generator = torch.Generator().manual_seed(step)
        picked = torch.randint(len(inputs.index), (_BATCH,), generator=generator)
        optimizer.zero_grad()
        _loss(inputs, weights, output, inputs.index[picked]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        advance(1)
        if (step + 1) % _SAVE_STEPS == 0:
            state = {"step": step + 1, "parameters": parameters, "optimizer": optimizer.state_dict()}
            kept.save(_FILE, state)
    return [Head(*(weight.detach() for weight in head)) for head in weights]


def _loss(inputs: Inputs, heads: Sequence[Head], output: Any, index: Tensor) -> Tensor:
    """Mean cross entropy to the target's distributions, in nats."""
    states, losses = inputs.text.states_at(index), []
    for depth, head in enumerate(heads):
        states = head(torch.cat([states, inputs.embeddings(index, depth)], dim=-1))
        with torch.no_grad():
            wanted = output(inputs.text.states_at(index + depth + 1)).softmax(dim=-1)
        losses.append(F.cross_entropy(output(states), wanted))
    return torch.stack(losses).mean()
