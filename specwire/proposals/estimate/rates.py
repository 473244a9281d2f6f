"""Means of what rounds measured, in which recent rounds count more. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul, truediv

_MEMORY = 0.9
"""Decay of a round's weight with each later one: texts change."""
_PRIOR_WEIGHT = 2.0
"""Weight of the prior, in judged tokens."""


class Rate:
    """Draft tokens that were accepted, as a share of what was promised; recent rounds count more.

    It belongs to one generation: what it leads to is a function of that generation's own committed tokens,
    and a seed that is given twice meets no choice that knows its random numbers.
    """

    def __init__(self, prior: float, memory: float = _MEMORY) -> None:
        self._prior, self._memory = prior, memory
        self._num_accepted = self._num_promised = 0.0

    @property
    def value(self) -> float:
        """In (0, 1) where each judged token was promised as 1."""
        num_accepted = self._num_accepted + _PRIOR_WEIGHT * self._prior
        return num_accepted / (self._num_promised + _PRIOR_WEIGHT)

    def add(self, num_accepted: int, num_promised: float) -> None:
        """A round that accepted so many draft tokens; all that were judged, with the rejected one, together
        promised so many."""
        self._num_accepted = self._memory * self._num_accepted + num_accepted
        self._num_promised = self._memory * self._num_promised + num_promised


class Mean:
    """Of a measure of rounds: of all of them alike at first, and of the recent ones when there are many.

    Args:
        value: before any round; an attribute, too.
        num_rounds: that this counts for.
        least_rate: least weight of the latest round.
    """

    def __init__(self, value: float, *, num_rounds: int, least_rate: float) -> None:
        self.value = value
        self._num_rounds, self._least_rate = num_rounds, least_rate

    def add(self, measured: float) -> None:
        """One round."""
        self._num_rounds += 1
        self.value += max(self._least_rate, 1 / self._num_rounds) * (measured - self.value)


def expected_tokens(probs: Iterable[float]) -> list[float]:
    """[num_draft_tokens + 1]: tokens that a round commits with 0, 1, ... draft tokens.

    Args:
        probs: [num_draft_tokens] of each draft token, to be accepted where those before it are.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return list(accumulate(accumulate(probs, mul, initial=1.0)))


def best_length(tokens: Sequence[float], round_times: Sequence[float], least: int = 0) -> int:
    """The smallest number of draft tokens, from `least` on, that promises the most tokens a second.

    Both [limit + 1] by number of draft tokens; times may be longer, and are in any unit.
    """
    rates = list(map(truediv, tokens, round_times))
    return rates.index(max(rates[least:]), least)
