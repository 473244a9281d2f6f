"""Emulated devices: models with known distributions and fixed costs, which take time but no processor time.

`--model emulated:step_ms=30` is a target, `--model emulated:step_ms=2,alpha=0.8` a draft for it. The engine,
the cache's bookkeeping and all services are the real ones; only the forward pass is replaced by a sleep and a
table. For measuring the system rather than a model, and for capacity planning.

The distribution at a position depends on (position, token before it), through a hash: four tokens of the
lower half of the vocabulary with probabilities 0.4, 0.3, 0.2, 0.1. The draft's equals the target's with
probability alpha, independently at each position, and otherwise prefers tokens that the target never emits:
so every rule accepts each draft token with probability alpha, as in the closed forms of Leviathan et al.
(2023).

Where the two differ and tokens are matched, the target's token is the draft's second choice with probability
`runner_up`, else the third choice with the same probability, and so on: 0.55 is close to a trained pair under
Gumbel coupling. With `period`, stretches of that many tokens alternate between `alpha` and `hard_alpha`.

A *paced* model (`pace`) is a real one whose passes take longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specwire.config.models import EMULATED
from specwire.engine.batch import Feed, Feeds, Packer
from specwire.engine.cache.kv_cache import PagePool
from specwire.engine.device import Decide, Runner
from specwire.engine.progress import LEAST_LIMIT_S
from specwire.errors import ModelLoadError
from specwire.support import IntArray

PROBS = np.array([0.4, 0.3, 0.2, 0.1])
"""Of the likely tokens, at every position."""
_MAX_INT = np.iinfo(np.int64).max
_NEVER = -1e9
_OVERSLEEP_RATE = 0.1
_MAX_OVERSLEEP_S = 0.0005
_BEHIND = -60.0
"""In nats: more than Gumbel noise can make up for."""
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedModel:
    """The parameters of `emulated:name=value,...`.

    Attributes:
        step_ms: time of a forward pass, sampling included, in milliseconds.
        token_us: additional time for each token after the first, in microseconds.
        alpha: probability that the distribution is the target's, in [0, 1].
        runner_up: where it is not, probability that the next choice is the target's, in [0, 1].
        period: length of the stretches with alternating alpha, in tokens; 0 for none.
        hard_alpha: alpha in every other stretch, beginning with the second one.
        repeat: the distributions repeat after so many tokens, and a greedy text does soon; 0 for never.
        vocab_size: even, at least 16.
        context_len: in tokens.
        seed: of the distributions; the same for target and draft.
    """

    step_ms: float = 30.0
    token_us: float = 0.0
    alpha: float = 1.0
    runner_up: float = 0.0
    period: int = 0
    hard_alpha: float = 0.0
    repeat: int = 0
    vocab_size: int = 64
    context_len: int = 1 << 20
    seed: int = 0

    @classmethod
    def parse(cls, source: str) -> EmulatedModel:
        """Read `emulated:name=value,...`; a ModelLoadError names what is unknown or out of range."""
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
        if min(model.step_ms, model.token_us, model.period, model.repeat) < 0:
            raise ModelLoadError(f"{source}: times and lengths must not be negative")
        if not all(0 <= share <= 1 for share in (model.alpha, model.hard_alpha, model.runner_up)):
            raise ModelLoadError(f"{source}: alpha, hard_alpha and runner_up must lie in [0, 1]")
        if model.vocab_size < 16 or model.vocab_size % 2:
            raise ModelLoadError(f"{source}: vocab_size must be even and at least 16")
        return model

    def describe(self) -> dict[str, object]:
        return {
            "context_len": self.context_len,
            "vocab_size": self.vocab_size,
            "num_parameters": 0,
            "dtype": "emulated",
            "eos_token_ids": (),
        }

    def agrees(self, positions: IntArray, tokens_before: IntArray) -> npt.NDArray[np.bool_]:
        """Where the distribution is the target's, bool [n]."""
        alphas = np.full(len(positions), self.alpha)
        if self.period:
            alphas[positions // self.period % 2 == 1] = self.hard_alpha
        return _unit(self._hash(positions, tokens_before, 1)) < alphas

    def num_wrong(self, positions: IntArray, tokens_before: IntArray) -> IntArray:
        """How many tokens the draft prefers to the target's where they differ, int64 [n]: geometric."""
        units = _unit(self._hash(positions, tokens_before, 3))
        missed = max(1 - self.runner_up, 1e-9)
        more: IntArray = np.floor(np.log(np.maximum(units, 1e-300)) / np.log(missed)).astype(np.int64)
        return more + 1

    def likeliest(self, positions: IntArray, tokens_before: IntArray) -> IntArray:
        """The target's likeliest token, int64 [n]; the next ones follow it, around the lower half."""
        half = np.uint64(self.vocab_size // 2)
        return (self._hash(positions, tokens_before, 2) % half).astype(np.int64)

    def log_probs(self, positions: IntArray, tokens_before: IntArray) -> npt.NDArray[np.float32]:
        """Log probabilities [n, vocab_size] of the tokens at `positions`, given the ones before."""
        half = self.vocab_size // 2
        start = self.likeliest(positions, tokens_before)
        token_ids = (start[:, None] + np.arange(len(PROBS))) % half
        log_probs = np.log(PROBS).astype(np.float32)
        out = np.full((len(positions), self.vocab_size), _NEVER, dtype=np.float32)
        np.put_along_axis(out, token_ids, log_probs[None], axis=1)
        wrong = np.flatnonzero(~self.agrees(positions, tokens_before))
        num_wrong = self.num_wrong(positions, tokens_before) if self.runner_up else None
        for row in wrong:
            num = len(PROBS) if num_wrong is None else int(num_wrong[row])
            if num >= len(PROBS):
                out[row] = _NEVER
            out[row] += _BEHIND
            out[row, token_ids[row, :num] + half] = log_probs[:num]
        return out

    def _hash(self, positions: IntArray, tokens_before: IntArray, salt: int) -> Words:
        """64 hashed bits of each (position, token), by SplitMix64 (Steele, Lea, Flood 2014)."""
        positions = positions % self.repeat if self.repeat else positions
        words = positions.astype(np.uint64) << np.uint64(24) | tokens_before.astype(np.uint64)
        words += np.uint64((self.seed * 2 + 1) * 0x9E3779B97F4A7C15 * (salt + 1) % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            words = (words ^ words >> np.uint64(shift)) * np.uint64(factor)
        return words ^ words >> np.uint64(31)


def _unit(words: Words) -> npt.NDArray[np.float64]:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class EmulatedRunner(Runner):
    """Stands in for `ModelRunner`: the same bookkeeping, a sleep instead of a forward pass."""

    def __init__(self, model: EmulatedModel, *, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.vocab_size = model.vocab_size
        self.longest_pause_s = LEAST_LIMIT_S
        self._model = model
        self._packer = Packer(self.pool, _MAX_INT, None)  # the table knows any token
        self._due_s = self._oversleep_s = 0.0

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """As `ModelRunner.forward`."""
        started_s = time.perf_counter()
        positions, tokens = self._append(feeds)
        num_tokens = sum(Feeds.of(feeds).num_query)
        self._due_s = started_s + self._model.step_ms / 1e3 + (num_tokens - 1) * self._model.token_us / 1e6
        return torch.from_numpy(self._model.log_probs(positions, tokens))

    def run(self, feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
        logits = self.forward(feeds)
        return None if question is None else decide(question, logits)

    def _append(self, feeds: Sequence[Feed]) -> tuple[IntArray, IntArray]:
        """Append to the caches; returns the position of each row and the token before it, int64 [n]."""
        with self._packer.packed(feeds) as batch:  # what is to be copied is dropped: there is nothing to copy
            return batch.positions[batch.rows] + 1, batch.token_ids[batch.rows]

    def end_step(self) -> None:
        """Sleep for the rest of the step's time, to a few microseconds: what sleeps overrun is subtracted."""
        due_s = self._due_s
        asleep_s = due_s - time.perf_counter() - self._oversleep_s
        if asleep_s > 0:
            time.sleep(asleep_s)
            over_s = time.perf_counter() - due_s + self._oversleep_s
            self._oversleep_s += _OVERSLEEP_RATE * (min(over_s, _MAX_OVERSLEEP_S) - self._oversleep_s)
        while time.perf_counter() < due_s:
            pass


def pace(runner: Any, least_pass_s: float) -> None:
    """Let the passes of a `device.Runner` take at least so long, deciding on their logits included: a small
    machine can show the effect of speculation on a large target.

    A pass computes the same as without it. If it is faster than the minimum the rest of the time is slept,
    and the processor is free for other work. All take the same time, as they do where reading the weights
    dominates.

    What a target drafts by itself takes the share of it that its drafts read of its weights; what a draft
    model beside it does takes its own time.
    """

    def paced(run: Callable[..., Any], share: Callable[[], float]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            due_s = time.perf_counter() + least_pass_s * share()
            answer = run(*args)
            time.sleep(max(0.0, due_s - time.perf_counter()))
            return answer

        return call

    runner.run = paced(runner.run, lambda: 1.0)
    if hasattr(runner, "run_draft"):
        runner.run_draft = paced(runner.run_draft, lambda: runner.draft_shape.share_read)
