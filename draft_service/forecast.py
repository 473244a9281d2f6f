"""The likely outcomes of a round: how much of a proposal is accepted, and which token follows. Pure.

    P(k accepted, then the token of rank r) = (reached_k - reached_k+1) · recovered_r        k < γ
                                              reached_γ · bonus_r                            k = γ

reached_k is the probability that at least k draft tokens are accepted
(`specwire/proposals/estimate/acceptance.py`); ranks are places among the draft's own
candidates at that position, best first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specwire.proposals.estimate.acceptance import OwnAcceptance, SharedAcceptance
from specwire.proposals.growth import NUM_RANKS, Calibration

_RANK_MEMORY, _RANK_PRIOR_WEIGHT = 0.99, 8.0
# Share of following tokens by rank, before anything is measured: from a trained pair under Gumbel coupling.
_PRIOR_RECOVERED = (0.58, 0.19, 0.08, 0.04, 0.02, 0.01, 0.01, 0.01)
_PRIOR_BONUS = (0.74, 0.15, 0.05, 0.02, 0.01, 0.005, 0.005, 0.005)


class RankCounts:
    """How often the token that followed was the draft's first, second, ... candidate at its position."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._counts = [_RANK_PRIOR_WEIGHT * share for share in prior]
        self._total = _RANK_PRIOR_WEIGHT

    def add(self, rank: int | None) -> None:
        """One round; `rank` is None when the token was not among the candidates."""
        self._counts = [_RANK_MEMORY * count for count in self._counts]
        self._total = _RANK_MEMORY * self._total + 1
        if rank is not None and rank < NUM_RANKS:
            self._counts[rank] += 1

    def shares(self) -> list[float]:
        """[NUM_RANKS] probability of each rank; the rest up to 1 is that no candidate follows."""
        return [count / self._total for count in self._counts]


class Likely(NamedTuple):
    """An outcome of a proposal: the tokens that are committed, and how likely they are."""

    probability: float
    token_ids: tuple[int, ...]


class SharedForecast:
    """Learnt from all streams of a kind."""

    def __init__(self) -> None:
        self.acceptance = SharedAcceptance()
        self.recovered = RankCounts(_PRIOR_RECOVERED)
        self.bonus = RankCounts(_PRIOR_BONUS)
        self.candidates = Calibration()


class Forecast:
    """Learns from the rounds of one stream, and lists the likeliest outcomes of the next round."""

    def __init__(self, shared: SharedForecast) -> None:
        self._shared = shared
        self._own = OwnAcceptance(shared.acceptance)

    @property
    def calibration(self) -> Calibration:
        """Of the candidates of trees."""
        return self._shared.candidates

    def add(self, num_drafted: int, num_accepted: int, rank: int | None) -> None:
        """A round ended; `rank` is the next token's place among the candidates, None if it was not one."""
        self._own.add(num_drafted, num_accepted)
        (self._shared.bonus if num_accepted == num_drafted else self._shared.recovered).add(rank)

    def outcomes(
        self, drafted: Sequence[int], candidates: Sequence[Sequence[int]], least: float
    ) -> list[Likely]:
        """The likely outcomes of a round with these draft tokens, likeliest first.

        Args:
            candidates: [num_drafted or num_drafted + 1] candidates by position, best first, without the draft
                token itself. Entry `num_drafted`, if present, is for the bonus token.
            least: outcomes less probable than this are left out.
        """
        num_drafted = len(drafted)
        reached = self._own.reached(num_drafted)
        recovered, bonus = self._shared.recovered.shares(), self._shared.bonus.shares()
        found: list[Likely] = []
        for k, token_ids in enumerate(candidates):
            ends_here = reached[k] - reached[k + 1] if k < num_drafted else reached[k]
            shares = recovered if k < num_drafted else bonus
            if ends_here * max(shares) >= least:
                found += [
                    Likely(ends_here * share, (*drafted[:k], token_id))
                    for share, token_id in zip(shares, token_ids, strict=False)
                    if ends_here * share >= least
                ]
        return sorted(found, key=lambda likely: -likely.probability)  # stable: the better rank first

    def bonus_probabilities(self, num_drafted: int) -> list[float]:
        """[NUM_RANKS] probability that a whole proposal is accepted and the candidate of a rank follows."""
        whole = self._own.reached(num_drafted)[-1]
        return [whole * share for share in self._shared.bonus.shares()]
