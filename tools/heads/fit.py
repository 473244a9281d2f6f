"""Heads in closed form: ridge regression of the target's next state on the last one and the next token.

One head after another, each on the states that the heads before it give, as it will be used. Beside the
inputs themselves, a head combines random nonlinear features of them, which the regression weights.

Regression on states or on logits is the same: logits are a linear function of states, and the least squares
of each are minimised by the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specwire.engine.heads.model import Head
from specwire.support import IntArray
from tools.drafts import Advance
from tools.heads.states import WINDOW

_CHUNK = 4096
_RIDGE = 1e-4
"""Of inputs that are scaled to a mean square of 1."""
_GAIN = 1.5
"""Standard deviation of the inputs of the nonlinearity."""


class Inputs:
    """The inputs and the targets of heads over a text.

    Args:
        token_ids, states: of the text, as of `run_text`.
        embedding: module from token ids to embeddings.
        num_following: tokens that are needed after each state.

    Attributes:
        index: int64, the tokens that so many others of their window follow.
    """

    def __init__(
        self,
        token_ids: IntArray,
        states: npt.NDArray[np.float16],
        embedding: Callable[[Tensor], Tensor],
        num_following: int,
    ) -> None:
        self._token_ids, self._states, self._embedding = token_ids, states, embedding
        index = torch.arange(len(token_ids))
        has_following = (index % WINDOW < WINDOW - num_following) & (index < len(index) - num_following)
        self.index = index[has_following]

    def states(self, index: Tensor) -> Tensor:
        """Float32 [n, state_size]."""
        return torch.from_numpy(self._states[index.numpy()]).float()

    def embeddings(self, index: Tensor, depth: int) -> Tensor:
        """Float32 [n, embedding_size], of the token that head number `depth` is given."""
        token_ids = torch.from_numpy(self._token_ids[(index + depth + 1).numpy()])
        return self._embedding(token_ids).float()

    def after(self, heads: Sequence[Head], index: Tensor) -> Tensor:
        """The state that these heads lead to along the text, float32 [n, state_size]."""
        states = self.states(index)
        for depth, head in enumerate(heads):
            states = head(torch.cat([states, self.embeddings(index, depth)], dim=-1))
        return states


@torch.inference_mode()
def fit(inputs: Inputs, heads: Sequence[Head], num_features: int, advance: Advance) -> Head:
    """The head that comes after these; `advance` is told of states."""
    up, up_bias = _random_features(inputs, heads, num_features)
    depth = len(heads)
    gram: Any = 0
    moments: Any = 0
    for index in torch.split(inputs.index, _CHUNK):
        x = torch.cat([inputs.after(heads, index), inputs.embeddings(index, depth)], dim=-1)
        features = torch.cat([Head(up, up_bias, up, up).features(x), torch.ones(len(x), 1)], dim=-1)
        gram = gram + (features.T @ features).double()
        moments = moments + (features.T @ inputs.states(index + depth + 1)).double()
        advance(len(index))
    scale = gram.diagonal().clamp_min(1e-30).rsqrt()
    scaled = gram * scale[:, None] * scale + _RIDGE * torch.eye(len(gram), dtype=gram.dtype)
    weights = (torch.linalg.solve(scaled, moments * scale[:, None]) * scale[:, None]).float().T
    return Head(up, up_bias, weights[:, :-1].contiguous(), weights[:, -1].contiguous())


def _random_features(inputs: Inputs, heads: Sequence[Head], num_features: int) -> tuple[Tensor, Tensor]:
    """Weights that see states and embeddings alike, whatever their size; the same for the same depth."""
    generator = torch.Generator().manual_seed(len(heads))
    index = inputs.index[:_CHUNK]
    parts = []
    for part in (inputs.after(heads, index), inputs.embeddings(index, len(heads))):
        drawn = torch.randn(num_features, part.shape[1], generator=generator)
        parts.append(drawn / part.square().mean().sqrt().clamp_min(1e-6))
    up = torch.cat(parts, dim=-1)
    return up * (_GAIN / up.shape[1] ** 0.5), torch.randn(num_features, generator=generator)
