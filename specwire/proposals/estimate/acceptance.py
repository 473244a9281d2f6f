"""How many draft tokens are accepted: reached_k is the probability that at least k are.

It is measured only from draft tokens that were judged. Under every rule reached_k does not depend on how many
tokens are drafted after the k-th (docs/exactness.md): what rounds of one length teach holds for others.
Pure: no clock, no I/O. The coordinator uses it to choose how many tokens to draft, and the draft service to
choose what to prepare ahead.

Texts differ in how predictable they are, and a text changes: code repeats itself, then continues with
something new. So the log odds of acceptance are a sum: of what all positions have in common, of what each has
of its own, and of a shift, how much easier a stream's text is at present. The first two are learnt from all
streams, in steps that shrink as more is known. Each stream has a belief about its shift: judged tokens update
it by Bayes' rule, and at every token the text may change, to one drawn from all texts (Adams and MacKay 2007,
arXiv 0710.3742, with a constant hazard). How much texts differ is learnt, too: greedy ones do, sampled ones
hardly.
"""

from __future__ import annotations

import copy
from itertools import accumulate

import numpy as np
import numpy.typing as npt

NUM_POSITIONS = 16
"""Positions at which acceptance is measured; later ones are extrapolated from the last."""

PRIOR_ACCEPTANCE = 0.75
_COMMON_VARIANCE, _POSITION_VARIANCE = 1.0, 0.25
"""Of the log odds of all positions and of each, before anything is measured."""
_MEMORY = 0.999
"""Decay of a judgement's weight with each later one."""
_NODE_GAIN = 0.47
"""What the logarithm of a tree's nodes adds to the log odds at its first position; at others it is divided by
the position. With 16, 32 and 64 nodes of the embedded pair under Gumbel coupling they are 1.2, 1.7 and 2.0
higher at the first than those of a chain, 0.7, 0.9 and 1.3 at the second, 0.4, 0.7 and 1.1 at the third, 0.1,
0.5 and 0.7 at the fourth; 1.1, 1.4 and more at the first under greedy decoding."""

_SHIFTS = np.linspace(-4.0, 4.0, 17)
_HAZARD = 0.01
"""Probability at each token that the text changes: from 0.005 to 0.02 what is foretold of recorded rounds of
the embedded pair is equally good, with 0.04 it is worse."""
_SPREAD, _LEAST_VARIANCE = 1.5, 0.01
"""Standard deviation of the shift over texts, before anything is measured; its variance is never less."""
_UNSEEN_SHARE = 0.1
"""Share of the prior belief that is left to texts not seen so far."""
_TEXT_RATE, _PRIOR_ROUNDS = 0.002, 20
"""Learning rate of how texts are, and rounds that what is assumed of it counts for."""
_MAX_LOG_ODDS = 7.0
_MAX_BATCH = 128
"""Rounds that are learnt from together, once that many are known; fewer at first."""

Floats = npt.NDArray[np.float64]


class SharedAcceptance:
    """Learnt from all streams of a kind: acceptance by position, and how much texts differ.

    Deep positions are judged in easy texts only, so the raw rate there is biased upwards. What is learnt of a
    position is what the shift that is believed of the text does not explain.

    Attributes:
        num_added: rounds so far.
        reached_likelihoods: [NUM_POSITIONS + 1][num_shifts] that k or more draft tokens are accepted.
        ended_likelihoods: [NUM_POSITIONS][num_shifts] that k are, and the next one is rejected.
        prior_belief: [num_shifts] belief about a text before anything is known of it.
    """

    def __init__(self) -> None:
        self.num_added, self._batch = 0, list[tuple[int, int, Floats]]()
        self._common = float(np.log(PRIOR_ACCEPTANCE / (1 - PRIOR_ACCEPTANCE)))
        self._positions = np.zeros(NUM_POSITIONS)
        self._common_variance, self._variances = _COMMON_VARIANCE, np.full(NUM_POSITIONS, _POSITION_VARIANCE)
        self._shift_variance = _SPREAD**2
        self._update()

    def of_trees(self, ratio: float) -> SharedAcceptance:
        """What is believed of trees with so many times the nodes before any was judged."""
        other = copy.copy(self)
        other._positions = self._positions + _gain(ratio)
        other._variances = np.full(NUM_POSITIONS, _POSITION_VARIANCE)
        other.num_added, other._batch = 0, []
        other._update()
        return other

    def add(self, num_drafted: int, num_accepted: int, belief: Floats) -> None:
        """One round of any stream, and the belief about its text after it.

        Draft tokens after a rejected one were never judged.
        """
        self._batch.append((min(num_drafted, num_accepted + 1), num_accepted, belief))
        self.num_added += 1
        if len(self._batch) >= min(_MAX_BATCH, 1 + self.num_added // 5):
            self._learn()
            self._update()

    def _learn(self) -> None:
        """Of the batch: a step of Newton's for what all positions have in common, and one for each."""
        judged, accepted, beliefs = (np.array(column) for column in zip(*self._batch, strict=True))
        positions = np.arange(NUM_POSITIONS)
        is_judged, is_accepted = positions < judged[:, None], positions < accepted[:, None]
        rates = beliefs @ self._rates
        excess = (is_judged * (is_accepted - rates)).sum(0)
        slopes = (is_judged * rates * (1 - rates)).sum(0)
        known, common_known = 1 + self._variances * slopes, 1 + self._common_variance * slopes.sum()
        self._positions = self._positions + self._variances * excess / known
        self._common += self._common_variance * float(excess.sum()) / common_known
        kept = _MEMORY ** is_judged.sum(0)
        self._variances = np.minimum(_POSITION_VARIANCE, self._variances / known / kept)
        self._common_variance = min(_COMMON_VARIANCE, self._common_variance / common_known / kept.prod())
        # How easy texts are on the average, and how much they differ.
        rate = max(1 - (1 - _TEXT_RATE) ** len(judged), len(judged) / (_PRIOR_ROUNDS + self.num_added))
        belief = beliefs.mean(0)
        self._shift_variance += rate * (float(belief @ _SHIFTS**2) - self._shift_variance)
        self._common += rate * float(belief @ _SHIFTS)
        # Beyond, acceptance does not change, and nothing would say that they go on growing.
        self._common = min(_MAX_LOG_ODDS, max(-_MAX_LOG_ODDS, self._common))
        room = _MAX_LOG_ODDS - self._common, _MAX_LOG_ODDS + self._common
        self._positions = np.clip(self._positions, -room[1], room[0])
        self._batch.clear()

    def reached(self, belief: Floats) -> Floats:
        """[NUM_POSITIONS + 1] probability that at least k draft tokens are accepted."""
        mean: Floats = belief.dot(self._reached)
        return mean

    def tokens(self, ratio: float = 1.0) -> list[float]:
        """[NUM_POSITIONS + 1] mean tokens committed by a round with 0, 1, ... draft tokens; or with trees as
        deep, of so many times the nodes."""
        reached = self._reached if ratio == 1 else _reached(self._rates_of(_gain(ratio)))
        return list(accumulate(self.prior_belief.dot(reached).tolist()))

    def _rates_of(self, gain: Floats | float = 0.0) -> Floats:
        """[num_shifts, NUM_POSITIONS] acceptance by text."""
        log_odds = np.clip(self._common + self._positions + gain, -_MAX_LOG_ODDS, _MAX_LOG_ODDS)
        rates: Floats = 1 / (1 + np.exp(-log_odds - _SHIFTS[:, None]))
        return rates

    def _update(self) -> None:
        seen = _normal(max(_LEAST_VARIANCE, self._shift_variance))
        self.prior_belief = (1 - _UNSEEN_SHARE) * seen + _UNSEEN_SHARE * _normal(_SPREAD**2)
        self._rates = self._rates_of()
        self._reached = _reached(self._rates)
        self.reached_likelihoods = list(self._reached.T)
        self.ended_likelihoods = list(-np.diff(self._reached.T, axis=0))


class OwnAcceptance:
    """The belief about one stream's text; it adapts within a few rounds.

    Attributes:
        shared: of the shape that is drafted at present; the text is as easy or hard with another one.
    """

    def __init__(self, shared: SharedAcceptance) -> None:
        self.shared = shared
        self._belief = shared.prior_belief

    def add(self, num_drafted: int, num_accepted: int, *, is_shared: bool = True) -> None:
        """Update on a round. Without draft tokens nothing is observed, but the text may have changed.

        Args:
            is_shared: what all streams share is learnt from it, too.
        """
        num_drafted, num_accepted = min(num_drafted, NUM_POSITIONS), min(num_accepted, NUM_POSITIONS)
        shared = self.shared
        if num_drafted:
            is_ended = num_accepted < num_drafted
            likelihoods = shared.ended_likelihoods if is_ended else shared.reached_likelihoods
            likely = self._belief * likelihoods[num_accepted]
            self._belief = likely / likely.sum()
            if is_shared:
                shared.add(num_drafted, num_accepted, self._belief)
        unchanged = (1 - _HAZARD) ** (num_accepted + 1)
        self._belief = unchanged * self._belief + (1 - unchanged) * shared.prior_belief

    def reached(self, num_drafted: int) -> list[float]:
        """[num_drafted + 1] probability that at least k draft tokens of the next round are accepted."""
        reached: list[float] = self.shared.reached(self._belief).tolist()
        while len(reached) <= num_drafted:
            reached.append(reached[-1] * reached[-1] / (reached[-2] or 1.0))
        return reached[: num_drafted + 1]

    def tokens(self, num_drafted: int) -> list[float]:
        """[num_drafted + 1] mean tokens committed by the next round with 0, 1, ... draft tokens."""
        return list(accumulate(self.reached(num_drafted)))


def _normal(variance: float) -> Floats:
    weights = np.exp(-0.5 * _SHIFTS**2 / variance)
    shares: Floats = weights / weights.sum()
    return shares


def _gain(ratio: float) -> Floats:
    """[NUM_POSITIONS] what so many times the nodes add to the log odds of acceptance."""
    gain: Floats = _NODE_GAIN * np.log(ratio) / np.arange(1, NUM_POSITIONS + 1)
    return gain


def _reached(rates: Floats) -> Floats:
    """[num_shifts, NUM_POSITIONS + 1] probability that at least k draft tokens are accepted."""
    return np.pad(np.cumprod(rates, axis=1), ((0, 0), (1, 0)), constant_values=1.0)
