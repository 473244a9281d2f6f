"""What a round is likely to end in: how much of a proposal is accepted, and which token follows.

    P(k accepted, then the token of rank r) = a_1 ... a_k · (1 - a_k+1) · recovered_r        k < γ
                                              a_1 ... a_γ · bonus_r                          k = γ

a_i is the acceptance at position i, given that those before were accepted; ranks are places among the draft's
own candidates at that position, best first. All of it is measured, and nothing here sees a draft token that
was not judged. Pure: no clock, no I/O. The coordinator uses it to choose how many tokens to draft, and the
draft service to choose what to prepare ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

NUM_POSITIONS = 16
"""Positions that acceptance is measured at; what comes later is like the last of them."""
NUM_RANKS = 8
"""Candidates at a position that are counted."""

PRIOR_ACCEPTANCE = 0.75
SHARED_MEMORY, SHARED_PRIOR_WEIGHT = 0.999, 2.0
OWN_MEMORY, OWN_PRIOR_WEIGHT = 0.9, 10.0
_RANK_MEMORY, _RANK_PRIOR_WEIGHT = 0.99, 8.0
# Of tokens that follow, by rank, before anything was measured: a trained pair under Gumbel coupling.
_PRIOR_RECOVERED = (0.58, 0.19, 0.08, 0.04, 0.02, 0.01, 0.01, 0.01)
_PRIOR_BONUS = (0.74, 0.15, 0.05, 0.02, 0.01, 0.005, 0.005, 0.005)


class Acceptance:
    """How often draft tokens are accepted, by position, given that those before them were.

    Old rounds are forgotten by and by: `memory` is what is left of a judgement after the next one, and
    `prior_weight` is how many judgements a prior counts for.
    """

    def __init__(self, memory: float, prior_weight: float) -> None:
        self._memory = memory
        self._prior_weight = prior_weight
        self._judged = [0.0] * NUM_POSITIONS
        self._accepted = [0.0] * NUM_POSITIONS
        self._all_judged = 0.0
        self._all_accepted = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One round: what came after a rejected token was never judged."""
        for i in range(min(num_drafted, num_accepted + 1, NUM_POSITIONS)):
            accepted = i < num_accepted
            self._judged[i] = self._judged[i] * self._memory + 1
            self._accepted[i] = self._accepted[i] * self._memory + accepted
            self._all_judged = self._all_judged * self._memory + 1
            self._all_accepted = self._all_accepted * self._memory + accepted

    def fade(self) -> None:
        """Forget as much as with one judgement at each position."""
        self._judged = [self._memory * n for n in self._judged]
        self._accepted = [self._memory * n for n in self._accepted]
        self._all_judged *= self._memory
        self._all_accepted *= self._memory

    def overall(self, prior: float) -> float:
        """At any position."""
        return self._mean(self._all_accepted, self._all_judged, prior)

    def by_position(self) -> list[float]:
        """[NUM_POSITIONS]; where little was judged, what holds at any position."""
        overall = self.overall(PRIOR_ACCEPTANCE)
        return [self._mean(a, n, overall) for a, n in zip(self._accepted, self._judged, strict=True)]

    def _mean(self, accepted: float, judged: float, prior: float) -> float:
        return (accepted + self._prior_weight * prior) / (judged + self._prior_weight)


def shared_acceptance() -> Acceptance:
    """For all streams together: slow to forget."""
    return Acceptance(SHARED_MEMORY, SHARED_PRIOR_WEIGHT)


def own_acceptance() -> Acceptance:
    """For one stream: follows its text within a few rounds."""
    return Acceptance(OWN_MEMORY, OWN_PRIOR_WEIGHT)


def scaled_to(own: Acceptance, overall: float, by_position: Sequence[float]) -> list[float]:
    """Acceptance by position as all streams have it, scaled to how easy this one's text is."""
    ease = own.overall(overall) / overall
    return [min(1.0, ease * rate) for rate in by_position]


class Ranks:
    """How often the token that followed was the draft's first, second, ... candidate for its place."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._counts = [_RANK_PRIOR_WEIGHT * share for share in prior]
        self._total = _RANK_PRIOR_WEIGHT

    def add(self, rank: int | None) -> None:
        """One round; None when it was none of them."""
        self._counts = [_RANK_MEMORY * count for count in self._counts]
        self._total = _RANK_MEMORY * self._total + 1
        if rank is not None and rank < NUM_RANKS:
            self._counts[rank] += 1

    def shares(self) -> list[float]:
        """[NUM_RANKS] probabilities; the rest is that none of them follows."""
        return [count / self._total for count in self._counts]


class Likely(NamedTuple):
    """An outcome and its probability."""

    probability: float
    num_accepted: int
    next_token: int


class SharedForecast:
    """What all streams of one kind learn together."""

    def __init__(self) -> None:
        self.acceptance = shared_acceptance()
        self.recovered = Ranks(_PRIOR_RECOVERED)
        self.bonus = Ranks(_PRIOR_BONUS)


class Forecast:
    """Of one stream: learns from its rounds, and names the likeliest outcomes of the next one."""

    def __init__(self, shared: SharedForecast) -> None:
        self._shared = shared
        self._own = own_acceptance()

    def add(self, num_drafted: int, num_accepted: int, rank: int | None) -> None:
        """A round ended; `rank` is the next token's place among the candidates, None if it was none."""
        for acceptance in (self._own, self._shared.acceptance):
            acceptance.add(num_drafted, num_accepted)
        (self._shared.bonus if num_accepted == num_drafted else self._shared.recovered).add(rank)

    def outcomes(self, num_drafted: int, candidates: Sequence[Sequence[int]], least: float) -> list[Likely]:
        """What a round of so many draft tokens may end in, likeliest first.

        Args:
            candidates: [num_drafted or num_drafted + 1], of each position, best first: the draft token itself
                left out. The last entry, if it is there, is for the token after all of them.
            least: probability that an outcome must have.
        """
        rates = self._acceptance(num_drafted)
        recovered, bonus = self._shared.recovered.shares(), self._shared.bonus.shares()
        found: list[Likely] = []
        reached = 1.0
        for k, token_ids in enumerate(candidates):
            rate = rates[k] if k < num_drafted else 0.0
            ends_here = reached * (1 - rate)
            shares = recovered if k < num_drafted else bonus
            if ends_here * max(shares) >= least:
                found += [
                    Likely(ends_here * share, k, token_id)
                    for share, token_id in zip(shares, token_ids, strict=False)
                    if ends_here * share >= least
                ]
            reached *= rate
        return sorted(found, reverse=True)

    def after_all(self, num_drafted: int) -> list[float]:
        """[NUM_RANKS] probabilities that a whole proposal is accepted and each candidate after it follows."""
        whole = math.prod(self._acceptance(num_drafted))
        return [whole * share for share in self._shared.bonus.shares()]

    def _acceptance(self, num_drafted: int) -> list[float]:
        acceptance = self._shared.acceptance
        rates = scaled_to(self._own, acceptance.overall(PRIOR_ACCEPTANCE), acceptance.by_position())
        return [rates[min(k, NUM_POSITIONS - 1)] for k in range(num_drafted)]
