"""How many draft tokens of a kind are accepted, as one generation measures it. Pure."""

from __future__ import annotations

from itertools import accumulate, repeat
from operator import mul

_MEMORY = 0.9
"""Decay of a round's weight with each later one: texts change."""
_PRIOR_WEIGHT = 2.0
"""Weight of the prior, in judged tokens."""


class Rate:
    """Share of judged draft tokens that were accepted; recent rounds count more.

    It belongs to one generation: what it leads to is a function of that generation's own committed tokens,
    and a seed that is given twice meets no choice that knows its random numbers.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._num_accepted = self._num_judged = 0.0

    @property
    def value(self) -> float:
        """In (0, 1)."""
        num_accepted = self._num_accepted + _PRIOR_WEIGHT * self._prior
        return num_accepted / (self._num_judged + _PRIOR_WEIGHT)

    def add(self, num_accepted: int, *, was_rejected: bool) -> None:
        """A round that accepted so many draft tokens, and rejected the next one or had no more of them."""
        self._num_accepted = _MEMORY * self._num_accepted + num_accepted
        self._num_judged = _MEMORY * self._num_judged + num_accepted + was_rejected


def expected_tokens(rate: float, num_draft_tokens: int) -> list[float]:
    """[num_draft_tokens + 1]: tokens that a round commits with 0, 1, ... draft tokens.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return list(accumulate(accumulate(repeat(rate, num_draft_tokens), mul, initial=1.0)))
