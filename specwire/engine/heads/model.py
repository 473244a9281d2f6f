"""Heads: from a hidden state of the target to hidden states of the tokens that follow, without its layers.

    state_0           of the last accepted token, as the target computed it
    state_k           head_k(state_k-1, embedding of the token that follows it)
    logits after it   the target's own output layer of state_k

The token after state_0 is known when heads are asked, so the first head is given it, and each later one the
draft token before it, which depends on the path in a tree (Ankner et al. 2024, "Hydra", arXiv 2402.05109).
Medusa's heads (Cai et al. 2024, arXiv 2401.10774) see state_0 alone. After the last head, it is used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from specwire.engine.heads import files
from specwire.errors import ModelLoadError


class Head(NamedTuple):
    """One head: x = [state; embedding], state' = out · [x; silu(up · x + up_bias)] + out_bias.

    Attributes:
        up: [num_features, state_size + embedding_size], up_bias: [num_features].
        out: [state_size, state_size + embedding_size + num_features], out_bias: [state_size].
    """

    up: Tensor
    up_bias: Tensor
    out: Tensor
    out_bias: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """States [n, state_size] from inputs [n, state_size + embedding_size]."""
        return F.linear(self.features(inputs), self.out, self.out_bias)

    def features(self, inputs: Tensor) -> Tensor:
        """What is combined linearly: [n, state_size + embedding_size + num_features]."""
        return torch.cat([inputs, F.silu(F.linear(inputs, self.up, self.up_bias))], dim=-1)

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], number: int) -> Self:
        return cls(*(weights[f"heads.{number}.{name}"] for name in cls._fields))

    def named(self, number: int) -> dict[str, Tensor]:
        """Its weights as `of` reads them."""
        return {f"heads.{number}.{name}": weight for name, weight in self._asdict().items()}


class TargetModules(NamedTuple):
    """What heads share with their target: modules from token ids to embeddings, and from states to logits,
    and how many ids it can read."""

    embedding: Any
    output: Any
    num_tokens: int

    @classmethod
    def of(cls, model: Any) -> Self:
        """Of a transformers causal language model."""
        from specwire.engine.model.runner import num_embeddings  # loads transformers

        return cls(model.get_input_embeddings(), model.get_output_embeddings(), num_embeddings(model))


class Heads:
    """Heads beside their target, which compute in this dtype; the target's modules keep theirs."""

    def __init__(
        self, heads: Sequence[Head], target: TargetModules, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._heads = [Head(*(weight.to(device, dtype) for weight in head)) for head in heads]
        self._target, self._dtype = target, dtype
        self._output_dtype = target.output.weight.dtype

    def advance(self, states: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """The states after one more token.

        Args:
            states: [n, state_size].
            token_ids: int64 [n], what follows each.
            depth: tokens between the target's own state and these.
        """
        head = self._heads[min(depth, len(self._heads) - 1)]
        embeddings = self._target.embedding(token_ids).to(self._dtype)
        return head(torch.cat([states.to(self._dtype), embeddings], dim=-1))

    def logits(self, states: Tensor) -> Tensor:
        """Float32 [n, vocab_size]; -inf for ids that the target cannot read."""
        found: Tensor = self._target.output(states.to(self._output_dtype)).float()
        found[:, self._target.num_tokens :] = float("-inf")
        return found


class States:
    """Notes what the output layer of a model reads in each pass: the states that logits are computed from.

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

    def beside(self, logits: Tensor, rows: Tensor | None = None) -> Tensor:
        """A pass's logits with their states, [num_rows, vocab_size + state_size], in the logits' dtype.

        Args:
            rows: of the logits, in what the output layer read; None where it read no more.
        """
        assert self._latest is not None
        states, self._latest = self._latest[0], None
        if rows is not None:
            states = states[rows]
        return torch.cat([logits, states.to(logits.dtype)], dim=-1)


def load(directory: Path, model: Any, name: str, fingerprint: str) -> Heads:
    """The heads in a directory, for this target, by its name and its weights' fingerprint.

    Raises:
        ModelLoadError: there are none, they cannot be read, or they are another target's.
    """
    config = files.read_config(directory)
    state_size = model.get_output_embeddings().weight.shape[1]
    if config.state_size != state_size:
        raise ModelLoadError(
            f"{directory}: heads for states of {config.state_size}, and {name!r} has {state_size}"
        )
    files.check_target(f"{directory}: heads", config, name, fingerprint)
    weights = files.read_weights(directory, config)
    try:
        heads = [Head.of(weights, number) for number in range(config.num_heads)]
    except KeyError as error:
        raise ModelLoadError(f"{directory}: {files.WEIGHTS} lacks {error}") from None
    dtype = torch.float32 if model.device.type == "cpu" else model.dtype
    return Heads(heads, TargetModules.of(model), model.device, dtype)
