"""What a round is likely to end in: how much of a proposal is accepted, and which token follows.

    P(k accepted, then the token of rank r) = (reached_k - reached_k+1) · recovered_r        k < γ
                                              reached_γ · bonus_r                            k = γ

reached_k is the probability that at least k draft tokens are accepted; ranks are places among the draft's own
candidates at that position, best first. All of it is measured, and nothing here sees a draft token that was
not judged. Pure: no clock, no I/O. The coordinator uses it to choose how many tokens to draft, and the draft
service to choose what to prepare ahead.

Texts differ, and a text changes: code repeats itself and then says something new. So acceptance by position
is measured over all streams, and a stream has a belief of its own: how probable it is that its text is now
easier or harder than that, by so much. Tokens that were accepted or refused change the belief by Bayes' rule;
with every token it may be another text from there on, as likely to be easy or hard as texts have been so far
(Adams and MacKay 2007, arXiv 0710.3742, with a constant hazard).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_POSITIONS = 16
"""Positions that acceptance is measured at; what comes later is like the last of them."""
NUM_RANKS = 8
"""Candidates at a position that are counted."""

PRIOR_ACCEPTANCE = 0.75
_PRIOR_LOG_ODDS = float(np.log(PRIOR_ACCEPTANCE / (1 - PRIOR_ACCEPTANCE)))
_PRIOR_WEIGHT = 2.0
"""Judgements that the prior counts for."""
_MEMORY = 0.999
"""What is left of a judgement after the next one."""
_RANK_MEMORY, _RANK_PRIOR_WEIGHT = 0.99, 8.0
# Of tokens that follow, by rank, before anything was measured: a trained pair under Gumbel coupling.
_PRIOR_RECOVERED = (0.58, 0.19, 0.08, 0.04, 0.02, 0.01, 0.01, 0.01)
_PRIOR_BONUS = (0.74, 0.15, 0.05, 0.02, 0.01, 0.005, 0.005, 0.005)

_SHIFTS = np.linspace(-4.0, 4.0, 17)
"""Of the log odds of acceptance: how much easier a text may be than all texts together."""
_SPREAD = 1.5
"""Of texts, before anything was measured: standard deviation of the shift."""
_CHANGE = 0.01
"""Probability, with each token, that the text is another one from there on."""
_USUAL_RATE, _FIRST_ROUNDS = 0.002, 10
"""How fast it is learnt which texts are usual: part of a round, and rounds that a guess counts for."""
_UNUSUAL = 0.2
"""What is left to texts that nobody has seen."""
_MOST_LOG_ODDS = 7.0
_NUM_STEPS, _LONGEST_STEP = 4, 1.0
_RENEW_EVERY = 8

Floats = npt.NDArray[np.float64]


class SharedAcceptance:
    """What all streams of a kind learn together: acceptance by position, and which texts are usual.

    Deep positions are judged in easy texts only. So acceptance there is not what was seen there, but what
    texts as easy as those were have at any position, as far as that explains what was seen.

    Attributes:
        log_reached: [shifts, NUM_POSITIONS + 1] log probability that at least k draft tokens are accepted.
        log_missed: [shifts, NUM_POSITIONS] log probability that the one there is not.
        usual: [shifts] belief about a text that nothing is known of.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self._judged = np.zeros((NUM_POSITIONS, len(_SHIFTS)))
        self._accepted = np.zeros(NUM_POSITIONS)
        self._log_odds = np.full(NUM_POSITIONS, _PRIOR_LOG_ODDS)
        self._any = _normalised(np.exp(-0.5 * (_SHIFTS / _SPREAD) ** 2))
        self._seen = self._any.copy()
        self._renew()

    def add(self, num_drafted: int, num_accepted: int, belief: Floats) -> None:
        """One round of any stream, and what is thought of its text after it.

        What came after a rejected token was never judged.
        """
        num_judged = min(num_drafted, num_accepted + 1)
        self._judged[:num_judged] = _MEMORY * self._judged[:num_judged] + belief
        self._accepted[:num_judged] *= _MEMORY
        self._accepted[:num_accepted] += 1
        self._seen += max(_USUAL_RATE, 1 / (_FIRST_ROUNDS + self._num_added)) * (belief - self._seen)
        self._num_added += 1
        if self._num_added % min(_RENEW_EVERY, 1 + self._num_added // 2) == 0:
            self._renew()

    def reached(self, belief: Floats) -> Floats:
        """[NUM_POSITIONS + 1] probability that at least k draft tokens are accepted."""
        mean: Floats = belief @ self._reached
        return mean

    def tokens(self) -> list[float]:
        """[NUM_POSITIONS + 1] tokens that a round with 0, 1, ... draft tokens commits on the average."""
        return list(accumulate(self.reached(self._seen).tolist()))

    def _renew(self) -> None:
        self.usual = (1 - _UNUSUAL) * self._seen + _UNUSUAL * self._any
        self._fit()
        rates = _logistic(self._log_odds[None, :] + _SHIFTS[:, None])
        self.log_reached = np.zeros((len(_SHIFTS), NUM_POSITIONS + 1))
        np.cumsum(np.log(rates), axis=1, out=self.log_reached[:, 1:])
        self.log_missed = np.log1p(-rates)
        self._reached = np.exp(self.log_reached)

    def _fit(self) -> None:
        """What would make as many accepted as there were: at all positions alike, then at each."""
        prior = _PRIOR_WEIGHT * self._any
        judged = self._judged.sum(0, keepdims=True) + prior
        accepted = self._accepted.sum(keepdims=True) + _PRIOR_WEIGHT * PRIOR_ACCEPTANCE
        anywhere = _solve(self._log_odds.mean(keepdims=True), judged, accepted)
        accepted = self._accepted + prior @ _logistic(anywhere + _SHIFTS)
        self._log_odds = _solve(self._log_odds, self._judged + prior, accepted)


class OwnAcceptance:
    """What is thought of one stream's text: follows it within a few rounds."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self._shared = shared
        self._belief = shared.usual

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One round, or one without draft tokens: then nothing was learnt, but the text went on."""
        num_drafted, num_accepted = min(num_drafted, NUM_POSITIONS), min(num_accepted, NUM_POSITIONS)
        shared = self._shared
        if num_drafted:
            log_seen = shared.log_reached[:, num_accepted]
            if num_accepted < num_drafted:
                log_seen = log_seen + shared.log_missed[:, num_accepted]
            self._belief = _normalised(self._belief * np.exp(log_seen - log_seen.max()))
            shared.add(num_drafted, num_accepted, self._belief)
        stays = (1 - _CHANGE) ** (num_accepted + 1)
        self._belief = stays * self._belief + (1 - stays) * shared.usual

    def reached(self, num_drafted: int) -> list[float]:
        """[num_drafted + 1] probability that at least k draft tokens of the next round are accepted."""
        reached: list[float] = self._shared.reached(self._belief).tolist()
        while len(reached) <= num_drafted:
            reached.append(reached[-1] * reached[-1] / (reached[-2] or 1.0))
        return reached[: num_drafted + 1]

    def tokens(self, num_drafted: int) -> list[float]:
        """[num_drafted + 1] that the next round commits on the average, with 0, 1, ... draft tokens."""
        return list(accumulate(self.reached(num_drafted)))


def _logistic(log_odds: Floats) -> Floats:
    rates: Floats = 1 / (1 + np.exp(-log_odds))
    return rates


def _solve(log_odds: Floats, judged: Floats, accepted: Floats) -> Floats:
    """By Newton's method: where sum over shifts of judged · acceptance is accepted.

    Args:
        log_odds: [n] to begin at.
        judged: [n, shifts].
        accepted: [n].

    Returns:
        [n] log odds, near enough.
    """
    for _ in range(_NUM_STEPS):
        rates = _logistic(log_odds[:, None] + _SHIFTS)
        slope = (judged * rates * (1 - rates)).sum(1)
        step = (accepted - (judged * rates).sum(1)) / slope
        log_odds = log_odds + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
        log_odds = np.clip(log_odds, -_MOST_LOG_ODDS, _MOST_LOG_ODDS)
    return log_odds


def _normalised(weights: Floats) -> Floats:
    total: Floats = weights / weights.sum()
    return total


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
        self.acceptance = SharedAcceptance()
        self.recovered = Ranks(_PRIOR_RECOVERED)
        self.bonus = Ranks(_PRIOR_BONUS)


class Forecast:
    """Of one stream: learns from its rounds, and names the likeliest outcomes of the next one."""

    def __init__(self, shared: SharedForecast) -> None:
        self._shared = shared
        self._own = OwnAcceptance(shared.acceptance)

    def add(self, num_drafted: int, num_accepted: int, rank: int | None) -> None:
        """A round ended; `rank` is the next token's place among the candidates, None if it was none."""
        self._own.add(num_drafted, num_accepted)
        (self._shared.bonus if num_accepted == num_drafted else self._shared.recovered).add(rank)

    def outcomes(self, num_drafted: int, candidates: Sequence[Sequence[int]], least: float) -> list[Likely]:
        """What a round of so many draft tokens may end in, likeliest first.

        Args:
            candidates: [num_drafted or num_drafted + 1], of each position, best first: the draft token itself
                left out. The last entry, if it is there, is for the token after all of them.
            least: probability that an outcome must have.
        """
        reached = self._own.reached(num_drafted)
        recovered, bonus = self._shared.recovered.shares(), self._shared.bonus.shares()
        found: list[Likely] = []
        for k, token_ids in enumerate(candidates):
            ends_here = reached[k] - reached[k + 1] if k < num_drafted else reached[k]
            shares = recovered if k < num_drafted else bonus
            if ends_here * max(shares) >= least:
                found += [
                    Likely(ends_here * share, k, token_id)
                    for share, token_id in zip(shares, token_ids, strict=False)
                    if ends_here * share >= least
                ]
        return sorted(found, key=lambda likely: -likely.probability)  # of equals, the better rank first

    def after_all(self, num_drafted: int) -> list[float]:
        """[NUM_RANKS] probabilities that a whole proposal is accepted and each candidate after it follows."""
        whole = self._own.reached(num_drafted)[-1]
        return [whole * share for share in self._shared.bonus.shares()]
