"""An EAGLE-3 over windows of text as it drafts: each step reads what the step before computed.

    step 0   f_0 f_1 f_2 ...      at every place from the target's states
    step 1       x_1 x_2 ...      from the states of step 0, one place on; and so on

At step k a place attends to the keys of step 0 up to the place where its draft began, k places before, and
to one key of each step since (the training-time test of Li et al. 2025, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specwire.engine.cache.layer_cache import Scoring
from specwire.engine.model.eagle3 import Eagle3

_DECAY = 0.8
"""Of the weights of steps."""


def loss_of(target: Any, drafter: Eagle3, tokens: Tensor, depth: int) -> Tensor:
    """Mean cross entropy to the target's distributions over the tokens that are drafted, in nats.

    Args:
        tokens: int64 [num_windows, length].
        depth: steps.
    """
    with torch.no_grad():
        output = target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        wanted = output.logits[:, 1:].float().softmax(dim=-1)[..., drafter.target_ids]
    losses = []
    for step, found in enumerate(unrolled(drafter, output.hidden_states, tokens, depth)):
        scores = drafter.logits(found).log_softmax(dim=-1)
        losses.append(-(_DECAY**step) * (wanted * scores)[:, step:].sum(dim=-1).mean())
    return torch.stack(losses).sum() / sum(_DECAY**step for step in range(depth))


def unrolled(drafter: Eagle3, shown: Sequence[Tensor], tokens: Tensor, depth: int) -> Iterator[Tensor]:
    """What the drafter computes in each step, [num_windows, length - 1, size]: at place i after token i + 1.

    Of step k the first k places mean nothing.

    Args:
        shown: states that enter each layer of the target, [num_windows, length, target_hidden_size].
        tokens, depth: as of `loss_of`.
    """
    num_windows, length = tokens.shape
    by_window = (num_windows, length - 1, -1)
    states = drafter.reduced([shown[number][:, :-1].flatten(0, 1) for number in drafter.settings.layer_ids])
    token_ids, positions = tokens[:, 1:].flatten(), torch.arange(1, length).repeat(num_windows)
    steps = Steps(num_windows)
    for _ in range(depth):
        found = drafter(states, token_ids, positions, steps)
        yield found.view(by_window)
        following = drafter.following(found).view(by_window)
        states = _later(following, 1, dim=1).flatten(0, 1)


class Steps:
    """Attention of all steps so far, over windows that lie one after another in a row."""

    def __init__(self, num_windows: int) -> None:
        self._num_windows = num_windows
        self._kept: list[tuple[Tensor, Tensor]] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See `attention.Attend`; a call is the next step."""
        group = query.shape[1] // key.shape[1]
        query, key, value = (
            each.view(self._num_windows, -1, *each.shape[1:]).transpose(1, 2) for each in (query, key, value)
        )
        self._kept.append((key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)))
        found = _attended(query * scoring.scale, self._kept)
        return found.transpose(1, 2).flatten(0, 1)


def _attended(query: Tensor, kept: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[num_windows, num_heads, num_places, head_dim], of the last step's queries."""
    (keys, values), *since = kept
    step, num_places = len(since), query.shape[2]
    sees = torch.ones(num_places, num_places, dtype=torch.bool).tril(-step)
    scores = [(query @ keys.transpose(2, 3)).masked_fill(~sees, float("-inf"))]
    for number, (key, _) in enumerate(since, 1):
        scores.append((query * _later(key, step - number, dim=2)).sum(dim=-1, keepdim=True))
    weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(values.dtype)
    found = weights[..., :num_places] @ values
    for number, (_, value) in enumerate(since, 1):
        column = num_places + number - 1
        found = found + weights[..., column : column + 1] * _later(value, step - number, dim=2)
    return found


def _later(states: Tensor, num: int, *, dim: int) -> Tensor:
    """Each so many places on, with zeros where there are none."""
    rest = states.narrow(dim, 0, states.shape[dim] - num)
    return torch.cat([torch.zeros_like(states.narrow(dim, 0, num)), rest], dim=dim)
