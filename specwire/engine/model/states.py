"""The hidden states that logits are computed from: what the target's output layer reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specwire.errors import ModelLoadError


class States:
    """Notes what the output layer of a model reads in each pass.

    Raises:
        ModelLoadError: it has no output layer of its own.
    """

    def __init__(self, model: Any) -> None:
        layer = model.get_output_embeddings()
        if layer is None:
            raise ModelLoadError(
                f"{model.config.model_type!r} has no output layer whose inputs could be read"
            )
        self._latest: Tensor | None = None
        layer.register_forward_pre_hook(self._note)

    def _note(self, _: Any, inputs: tuple[Tensor, ...]) -> None:
        self._latest = inputs[0]

    def beside(self, logits: Tensor) -> Tensor:
        """A pass's logits, as the model returned them, with their states: [num_rows, vocab_size +
        state_size], in the logits' dtype."""
        assert self._latest is not None
        states, self._latest = self._latest[0], None
        return torch.cat([logits, states.to(logits.dtype)], dim=-1)
