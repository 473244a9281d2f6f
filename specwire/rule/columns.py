"""What sampling reads of the requests behind the rows of a step, as columns instead of objects. No torch.

A sequence's parameters are encoded once (`Encoded`). A step lists them, and makes a column when it is needed:
a greedy step needs none. Only rows with penalties, biases or grammars are looked at one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from specwire.core import WARPS, Rule, SamplingParams
from specwire.support import IntArray

Doubles = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint8]
Number = TypeVar("Number", bound=np.generic)

GREEDY = 1
GUMBEL = 2
"""Tokens are matched under Gumbel coupling."""
WARPED = 4
"""One of `WARPS` changes the distribution; never set with `GREEDY`."""
EDITED = 8
"""Biases, penalties, `min_tokens` or a grammar change the logits."""
LOGPROBS = 16
"""Log probabilities are reported."""
MATCHED = GREEDY | GUMBEL

_MIN_TEMPERATURE = 1e-30
"""Below it the distribution is the same, but logits divided by the temperature would overflow float32."""
_MAX_TEMPERATURE = 1e30
"""Above it, too; float32 would make it infinite, and what is masked, divided by that, is not a number."""
_NEUTRAL = tuple(float(getattr(SamplingParams(), name)) for name in WARPS)

Places = slice | IntArray
"""Indices of rows; a slice where they are all."""


class Encoded(NamedTuple):
    """The sampling parameters of one sequence.

    Attributes:
        traits: the flags above.
        seed: of the request.
        warps: [len(WARPS)], their defaults where they have no effect.
    """

    traits: int
    seed: int
    warps: tuple[float, ...]

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> Self:
        warps = _NEUTRAL
        if not params.greedy:
            warps = (
                min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE),
                *(getattr(params, name) for name in WARPS[1:]),
            )
        flags = {
            GREEDY: params.greedy,
            GUMBEL: params.rule is Rule.GUMBEL and not params.greedy,
            WARPED: warps != _NEUTRAL,
            EDITED: bool(params.logit_bias)
            or params.needs_history
            or params.min_tokens > 0
            or params.grammar is not None,
            LOGPROBS: params.logprobs is not None,
        }
        traits = sum(flag for flag, is_set in flags.items() if is_set)
        return cls(traits, seed, warps)


class Masks(Protocol):
    """Of the rows of one request: which tokens its grammar allows."""

    def of_row(self, row: int) -> Bits | None:
        """One bit for each token id, lowest bit first, uint8 [vocab_size / 8]; None for no limits.

        Waits until it is computed. Tokens beyond are not allowed.
        """


class Row(NamedTuple):
    """The request behind one row of logits.

    Attributes:
        params: how to sample.
        prompt_len: tokens of `history` that belong to the prompt.
        history: all tokens before this position: prompt, output and earlier draft tokens. Read only
            where `params.needs_history`; an integer array is read faster than a list.
        position: absolute index of the token to be drawn.
        seed: of the request; with the position it determines every random number.
        base_len: committed length that the row's round or proposal begins at: where tokens are sampled,
            random numbers are keyed by it.
        masks: of the request, where it has a grammar.
        mask_row: this one's among them.
    """

    params: SamplingParams
    prompt_len: int
    history: Sequence[int]
    position: int
    seed: int
    base_len: int = 0
    masks: Masks | None = None
    mask_row: int = 0


@dataclass(frozen=True)
class Rows:
    """The requests behind the rows of logits of a step.

    Attributes:
        encoded: [num_requests].
        num_rows: [num_requests], rows of each request, which lie together.
        firsts: [num_requests], position of each request's first row; the others follow it.
        base_lens: [num_requests], see `Row`.
        paths: of requests whose rows are at other positions (of a tree), all their positions; by index.
        edited: the rows that are `EDITED`, by index.
    """

    encoded: Sequence[Encoded]
    num_rows: Sequence[int]
    firsts: Sequence[int]
    base_lens: Sequence[int]
    paths: Mapping[int, Sequence[int]] = field(default_factory=dict)
    edited: Mapping[int, Row] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """From single rows."""
        requests = {(id(row.params), row.seed): row for row in rows}
        known = {key: Encoded.of(row.params, row.seed) for key, row in requests.items()}
        encoded = [known[id(row.params), row.seed] for row in rows]
        edited = {i: row for i, row in enumerate(rows) if encoded[i].traits & EDITED}
        firsts, base_lens = [row.position for row in rows], [row.base_len for row in rows]
        return cls(encoded, [1] * len(rows), firsts, base_lens, edited=edited)

    def having(self, flag: int, *, wanted: bool = True) -> Places | None:
        """The rows with any of these traits, or those without; None if there are none."""
        found = {bool(traits & flag) == wanted for traits in self._kinds}
        if len(found) < 2:
            return slice(None) if True in found else None
        return np.flatnonzero((self._each([e.traits for e in self.encoded]) & flag != 0) == wanted)

    def take(self, places: Places) -> Rows:
        """Some rows, in this order. Edits are not kept: they come first."""
        if isinstance(places, slice):
            return self
        request = self._request[places].tolist()
        return Rows(
            [self.encoded[i] for i in request],
            [1] * len(request),
            self.positions[places].tolist(),
            [self.base_lens[i] for i in request],
        )

    @cached_property
    def seeds(self) -> IntArray:
        """int64 [num_rows]."""
        return self._each([encoded.seed for encoded in self.encoded])

    @cached_property
    def positions(self) -> IntArray:
        """int64 [num_rows], see `Row`."""
        ends = list(accumulate(self.num_rows))
        shifts = map(operator.add, map(operator.sub, self.firsts, ends), self.num_rows)
        positions = self._each(list(shifts)) + np.arange(ends[-1])
        for i, path in self.paths.items():
            positions[ends[i] - len(path) : ends[i]] = path
        return positions

    @cached_property
    def bases(self) -> IntArray:
        """int64 [num_rows], see `Row.base_len`."""
        return self._each([*self.base_lens])

    @cached_property
    def warps(self) -> Doubles | None:
        """float64 [num_rows, len(WARPS)] as in `Encoded`; None if no row is `WARPED`."""
        if not any(traits & WARPED for traits in self._kinds):
            return None
        return np.array([encoded.warps for encoded in self.encoded])[self._request]

    @cached_property
    def _kinds(self) -> set[int]:
        return {encoded.traits for encoded in self.encoded}

    @cached_property
    def _request(self) -> IntArray:
        """int64 [num_rows], the index of each row's request."""
        return np.repeat(np.arange(len(self.encoded)), self.num_rows)

    def _each(self, values: list[int]) -> IntArray:
        """A number of each request, at each of its rows."""
        return np.repeat(np.array(values, np.int64), self.num_rows)


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
