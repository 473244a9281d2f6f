"""Emulated devices: models with a known law and set costs, which take time without taking the processor.

`--model emulated:step_ms=30` is a target, `--model emulated:step_ms=2,alpha=0.8` a draft for it. The
engine, the cache's bookkeeping and everything around are the real ones; only the forward pass is replaced
by a sleep and a table. For measuring the system rather than a model, and for planning.

The law at a position depends on (position, token before it), through a hash: four tokens of the lower
half of the vocabulary with probabilities 0.4, 0.3, 0.2, 0.1. The draft agrees with the target exactly with
probability alpha, independently at each position, and else likes tokens the target never says: so every
rule accepts each draft token with probability alpha, as the closed forms of Leviathan et al. (2023) assume.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specwire.config import EMULATED
from specwire.core import IntArray
from specwire.engine.kv_cache import PagePool, SequenceCache
from specwire.engine.runner import Feed
from specwire.errors import ModelLoadError

_PROBS = np.array([0.4, 0.3, 0.2, 0.1])
_NEVER = -1e9
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedModel:
    """What `emulated:name=value,...` says.

    Attributes:
        step_ms: time of a forward pass, in milliseconds.
        token_us: time it takes longer for each token after the first, in microseconds.
        alpha: probability that the law is the target's, in [0, 1].
        vocab_size: even, at least 16.
        context_len: in tokens.
        seed: of the law; the same for target and draft.
    """

    step_ms: float = 30.0
    token_us: float = 0.0
    alpha: float = 1.0
    vocab_size: int = 64
    context_len: int = 1 << 20
    seed: int = 0

    @classmethod
    def parse(cls, source: str) -> EmulatedModel:
        """Read `emulated:name=value,...`.

        Raises:
            ModelLoadError: naming what is unknown or out of range.
        """
        kinds: dict[str, type[float]] = {
            field.name: int if isinstance(field.default, int) else float for field in fields(cls)
        }
        values: dict[str, float] = {}
        for part in filter(None, source.removeprefix(EMULATED).split(",")):
            name, _, text = part.partition("=")
            try:
                values[name] = kinds[name](text)
            except (KeyError, ValueError):
                raise ModelLoadError(
                    f"{source}: {part!r} is not one of {', '.join(kinds)} = number"
                ) from None
        model = cls(**values)  # type: ignore[arg-type]
        if model.step_ms < 0 or model.token_us < 0 or not 0 <= model.alpha <= 1:
            raise ModelLoadError(f"{source}: times must not be negative, and alpha must lie in [0, 1]")
        if model.vocab_size < 16 or model.vocab_size % 2:
            raise ModelLoadError(f"{source}: vocab_size must be even and at least 16")
        return model

    def describe(self) -> dict[str, object]:
        """What the handshake tells about it."""
        return {
            "context_len": self.context_len,
            "vocab_size": self.vocab_size,
            "num_parameters": 0,
            "dtype": "emulated",
            "eos_token_ids": (),
        }

    def agrees(self, positions: IntArray, tokens_before: IntArray) -> npt.NDArray[np.bool_]:
        """Where the law is the target's, bool [n]."""
        return _unit(self._hash(positions, tokens_before, 1)) < self.alpha

    def laws(self, positions: IntArray, tokens_before: IntArray) -> npt.NDArray[np.float32]:
        """Log probabilities [n, vocab_size] of the tokens at `positions`, given the ones before."""
        half = self.vocab_size // 2
        start = (self._hash(positions, tokens_before, 2) % np.uint64(half)).astype(np.int64)
        token_ids = (start[:, None] + np.arange(len(_PROBS))) % half
        token_ids[~self.agrees(positions, tokens_before)] += half
        out = np.full((len(positions), self.vocab_size), _NEVER, dtype=np.float32)
        np.put_along_axis(out, token_ids, np.log(_PROBS).astype(np.float32)[None], axis=1)
        return out

    def _hash(self, positions: IntArray, tokens_before: IntArray, salt: int) -> Words:
        """64 well mixed bits of each (position, token) (Steele, Lea, Flood 2014: SplitMix64)."""
        words = positions.astype(np.uint64) << np.uint64(24) | tokens_before.astype(np.uint64)
        words += np.uint64((self.seed * 2 + 1) * 0x9E3779B97F4A7C15 * (salt + 1) % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
        return words ^ words >> np.uint64(31)


def _unit(words: Words) -> npt.NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class EmulatedRunner:
    """Stands in for `ModelRunner`: the same bookkeeping, a sleep instead of a forward pass."""

    def __init__(self, model: EmulatedModel, *, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.vocab_size = model.vocab_size
        self._model = model

    def new_sequence(self) -> SequenceCache:
        """An empty sequence."""
        return self.pool.new_sequence()

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """As `ModelRunner.forward`; takes the time that the model's costs add up to."""
        positions: list[int] = []
        tokens: list[int] = []
        for feed in feeds:
            feed.cache.append(len(feed.token_ids))
            for i in range(feed.num_rows, 0, -1):
                positions.append(feed.cache.length - i + 1)
                tokens.append(int(feed.token_ids[-i]))
        num_tokens = sum(len(feed.token_ids) for feed in feeds)
        time.sleep(self._model.step_ms / 1e3 + (num_tokens - 1) * self._model.token_us / 1e6)
        return torch.from_numpy(self._model.laws(np.array(positions, np.int64), np.array(tokens, np.int64)))
