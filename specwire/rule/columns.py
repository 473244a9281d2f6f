"""What sampling reads of the requests behind the rows of a step, as columns instead of objects. No torch.

A sequence's parameters are encoded once (`Encoded`). A step stacks them, and most steps need no more: only
rows with penalties or biases are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from specwire.core import IntArray, Rule, SamplingParams

Doubles = npt.NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)

GREEDY = 1
GUMBEL = 2
"""Tokens are matched under Gumbel coupling."""
BLOCK = 4
"""Random numbers are keyed by the base of the round."""
WARPED = 8
"""Temperature, top-k, top-p or min-p change the distribution; never set with `GREEDY`."""
EDITED = 16
"""Biases or penalties change the logits."""
LOGPROBS = 32
"""Log probabilities are reported."""
MATCHED = GREEDY | GUMBEL

_MIN_TEMPERATURE = 1e-30
"""Below it the distribution is the same, but logits divided by the temperature would overflow float32."""
_NUM_WARPS = 4
_NEUTRAL = np.array([1.0, 0.0, 1.0, 0.0])


class Encoded(NamedTuple):
    """The sampling parameters of one sequence.

    Attributes:
        traits: the flags above.
        seed: of the request.
        warps: float64 [4]: temperature, top-k, top-p, min-p; where they have no effect 1, 0, 1, 0.
    """

    traits: int
    seed: int
    warps: Doubles

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> Self:
        """Encode parameters."""
        warps = _NEUTRAL
        if not params.greedy:
            temperature = max(params.temperature, _MIN_TEMPERATURE)
            warps = np.array([temperature, params.top_k, params.top_p, params.min_p])
        flags = {
            GREEDY: params.greedy,
            GUMBEL: params.rule is Rule.GUMBEL and not params.greedy,
            BLOCK: params.rule is Rule.BLOCK,
            WARPED: bool((warps != _NEUTRAL).any()),
            EDITED: bool(params.logit_bias) or params.needs_history,
            LOGPROBS: params.logprobs is not None,
        }
        return cls(sum(flag for flag, is_set in flags.items() if is_set), seed, warps)


class Stack(NamedTuple):
    """The parameters of several sequences; int64 [n] each.

    Attributes:
        warps: float64 [n, 4] as in `Encoded`; [0, 4] if none is `WARPED`.
    """

    traits: IntArray
    seeds: IntArray
    warps: Doubles

    @classmethod
    def of(cls, encoded: Sequence[Encoded]) -> Self:
        """Stack them."""
        num = len(encoded)
        traits = np.fromiter((each.traits for each in encoded), np.int64, num)
        seeds = np.fromiter((each.seed for each in encoded), np.int64, num)
        warps = np.empty((0, _NUM_WARPS))
        if (traits & WARPED).any():
            warps = np.concatenate([each.warps for each in encoded]).reshape(num, _NUM_WARPS)
        return cls(traits, seeds, warps)

    def take(self, places: IntArray) -> Self:
        """Those at `places`, in their order."""
        warps = self.warps[places] if len(self.warps) else self.warps
        return self._replace(traits=self.traits[places], seeds=self.seeds[places], warps=warps)


class Row(NamedTuple):
    """The request behind one row of logits.

    Attributes:
        params: how to sample.
        prompt_len: tokens of `history` that belong to the prompt.
        history: all tokens before this position: prompt, output and earlier draft tokens. Read only
            where `params.needs_history`; an integer array is read faster than a list.
        position: absolute index of the token to be drawn.
        seed: of the request; with the position it determines every random number.
        base_len: committed length that the row's round or proposal begins at. Random numbers depend on it
            under block verification, and only there.
    """

    params: SamplingParams
    prompt_len: int
    history: Sequence[int]
    position: int
    seed: int
    base_len: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests behind rows of logits.

    Attributes:
        stack: the parameters of each row's request.
        positions: int64 [num_rows], see `Row`.
        bases: int64 [num_rows], what random numbers are keyed by besides: see `SamplingParams.key_base`.
        edited: the rows that are `EDITED`, by index.
    """

    stack: Stack
    positions: IntArray
    bases: IntArray
    edited: Mapping[int, Row]

    @classmethod
    def at(
        cls, stack: Stack, positions: IntArray, base_lens: IntArray, edited: Mapping[int, Row] | None = None
    ) -> Self:
        """From the base of each row's round; arguments as the attributes."""
        return cls(stack, positions, np.where(stack.traits & BLOCK, base_lens, 0), edited or {})

    @classmethod
    def of(cls, rows: Sequence[Row] | Rows) -> Rows:
        """The columns of single rows; columns as they are."""
        if isinstance(rows, Rows):
            return rows
        stack = Stack.of([Encoded.of(row.params, row.seed) for row in rows])
        positions = np.array([row.position for row in rows], np.int64)
        base_lens = np.array([row.base_len for row in rows], np.int64)
        edited = {i: row for i, row in enumerate(rows) if stack.traits[i] & EDITED}
        return cls.at(stack, positions, base_lens, edited)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def traits(self) -> IntArray:
        """int64 [num_rows], the flags of each row's request."""
        return self.stack.traits

    def take(self, places: IntArray) -> Rows:
        """Some rows, in this order; all of them if there are as many. Edits are not kept: they come first."""
        if len(places) == len(self):
            return self
        return Rows(self.stack.take(places), self.positions[places], self.bases[places], {})


def padded(flat: npt.NDArray[Number], lengths: IntArray, filling: int) -> npt.NDArray[Number]:
    """Rows that lie one after another as [num_rows, longest row], filled up where a row is shorter.

    Args:
        flat: [sum of lengths].
    """
    width = int(lengths.max(initial=0))
    if len(flat) == len(lengths) * width:
        return flat.reshape(len(lengths), width)
    out = np.full((len(lengths), width), filling, dtype=flat.dtype)
    out[np.arange(width) < lengths[:, None]] = flat
    return out
