"""List coupling in closed form: how likely the target's token is among those of several chains."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Doubles = np.ndarray


class Sum(NamedTuple):
    """Σ coefficients · exp(-rates · s), a function of s ≥ 0."""

    coefficients: Doubles
    rates: Doubles

    def times(self, other: Sum) -> Sum:
        return Sum(
            np.outer(self.coefficients, other.coefficients).ravel(),
            np.add.outer(self.rates, other.rates).ravel(),
        )

    def integral(self, rate: float) -> float:
        """Of the sum times exp(-rate · s), over all s."""
        return float((self.coefficients / (self.rates + rate)).sum())


def match_probability(draft: Doubles, target: Doubles, shares: Sequence[int]) -> float:
    """The probability that the target's token is one of the chains'.

    Let E = exp(-Gumbel noise) be the least number of a token in a chain's n lists, which is exponential with
    the rate n. The target takes the token with the least E / target of all chains, a chain the one with the
    least E / draft of its own. If the target's token is j, with E = s · target[j] in the lists of chain k,
    then every other number has E > s · target, and given s the chains are independent of each other. What is
    left is the integral of a sum of exponentials over s.

    Args:
        draft: [vocab_size], of all chains.
        target: [vocab_size].
        shares: [num_chains] lists of each.
    """
    missed = 0.0
    for token in np.flatnonzero(target).tolist():
        losing = [_other_token(draft, target, token, num) for num in shares]
        for k, num in enumerate(shares):
            both = _other_token_where_won(draft, target, token, num)
            for other in (*losing[:k], *losing[k + 1 :]):
                both = both.times(other)
            missed += num * target[token] * both.integral(sum(shares))
    return 1 - missed


def _other_token_where_won(draft: Doubles, target: Doubles, token: int, num_lists: int) -> Sum:
    """A chain's token is another one, given that E[token] = s · target[token] in its own lists."""
    if not draft[token]:
        return Sum(np.ones(1), np.zeros(1))
    excess = np.maximum(0, draft * target[token] / draft[token] - target)
    return Sum(np.array([1.0, -1.0]), np.array([0.0, num_lists * np.delete(excess, token).sum()]))


def _other_token(draft: Doubles, target: Doubles, token: int, num_lists: int) -> Sum:
    """A chain's token is another one, given that all of its numbers are over s · target.

    It is `token` with E / draft = s · v for some v from target[token] / draft[token] on. The chance that no
    other one is less is exp(-num_lists · s · f(v)), f(v) = Σ max(0, draft · v - target), which is linear
    between the ratios target / draft.
    """
    if not draft[token]:
        return Sum(np.ones(1), np.zeros(1))
    there = draft > 0
    own = target[token] / draft[token]
    ratios = target[there] / draft[there]
    ends = [own, *np.unique(ratios[ratios > own]), np.inf]
    coefficients, rates = [1.0], [0.0]
    for start, end in pairwise(ends):
        slope = draft[there][ratios <= start].sum()
        for sign, at in ((-1, start), (1, end)):
            if at < np.inf:
                coefficients.append(sign * draft[token] / slope)
                rates.append(num_lists * np.maximum(0, draft * at - target).sum())
    return Sum(np.array(coefficients), np.array(rates))


def matching_bound(draft: Doubles, target: Doubles, num_chains: int) -> float:
    """The list matching lemma (Rowan et al. 2025, arXiv 2506.05632), of chains with equal shares."""
    found = 0.0
    for token in np.flatnonzero((draft > 0) & (target > 0)):
        larger = np.maximum(target / target[token], draft / draft[token]).sum()
        found += num_chains / (larger + (num_chains - 1) / target[token])
    return found
