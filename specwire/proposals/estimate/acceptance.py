"""How many draft tokens are accepted: reached_k is the probability that at least k are.

It is measured only from draft tokens that were judged. Under every rule reached_k does not depend on how many
tokens are drafted after the k-th (docs/exactness.md): what rounds of one length teach holds for others.
Pure: no clock, no I/O. The coordinator uses it to choose how many tokens to draft, and the draft service to
choose what to prepare ahead.

Texts differ in how predictable they are, and a text changes: code repeats itself, then continues with
something new. So acceptance by position is measured over all streams, and each stream keeps a belief: a
distribution over how much easier or harder its text is at present, and over how soon that changes. Accepted
and rejected tokens update the belief by Bayes' rule; at every token the text may change, to one drawn from
those seen so far (Adams and MacKay 2007, arXiv 0710.3742, with a constant hazard of each kind of text).
"""

from __future__ import annotations

import copy
from itertools import accumulate

import numpy as np
import numpy.typing as npt

NUM_POSITIONS = 16
"""Positions at which acceptance is measured; later ones are extrapolated from the last."""

PRIOR_ACCEPTANCE = 0.75
_PRIOR_LOG_ODDS = float(np.log(PRIOR_ACCEPTANCE / (1 - PRIOR_ACCEPTANCE)))
_PRIOR_WEIGHT = 2.0
"""Weight of the prior, in judgements."""
_NODE_GAIN = 0.47
"""What the logarithm of a tree's nodes adds to the log odds at its first position; at others it is divided by
the position. With 16, 32 and 64 nodes of the embedded pair under Gumbel coupling they are 1.2, 1.7 and 2.0
higher at the first than those of a chain, 0.7, 0.9 and 1.3 at the second, 0.4, 0.7 and 1.1 at the third, 0.1,
0.5 and 0.7 at the fourth; 1.1, 1.4 and more at the first under greedy decoding."""
_MEMORY = 0.999
"""Decay of a judgement's weight with each later one."""

_HAZARDS = (0.02, 0.5)
"""By kind of text: probability at each token that it changes.

Greedy texts of the embedded pair last, sampled ones hardly do: with 0.01 for all, the logarithm of what is
expected of a round's accepted tokens is -0.642, -1.535 and -1.503 (greedy, Gumbel, rejection); with 0.2 for
all -0.726, -1.527 and -1.488; with these two -0.646, -1.522 and -1.485, and without any belief of a stream's
own -0.813, -1.529 and -1.479.
"""
_SHIFTS = np.tile(np.linspace(-4.0, 4.0, 17), len(_HAZARDS))
"""Shifts of the log odds of acceptance: how much easier a text is than the average of all texts. All of them
for each kind of text."""
_ONES = np.ones(len(_SHIFTS))
_SPREAD = 1.5
"""Standard deviation of the shift over texts, before anything is measured."""
_IS_KIND = np.kron(np.eye(len(_HAZARDS)), np.ones((len(_SHIFTS) // len(_HAZARDS),) * 2))
"""[num_shifts, num_shifts]: 1 where both are of the same kind of text."""
_UNCHANGED = [
    np.repeat(1 - np.array(_HAZARDS), len(_SHIFTS) // len(_HAZARDS)) ** (num_accepted + 1)
    for num_accepted in range(NUM_POSITIONS + 1)
]
"""[num_shifts] probability that the text does not change during a round, by accepted draft tokens."""
_OTHER_KIND = 0.01
"""Probability that a text that changes becomes one of any kind: none is ever ruled out. With 0.001 eight
rejected proposals after a thousand rounds of sampled text went unnoticed."""
_TEXT_RATE, _TEXT_PRIOR_ROUNDS = 0.002, 10
"""Learning rate of the distribution of texts, and the weight of its prior in rounds."""
_UNSEEN_SHARE = 0.2
"""Share of the prior belief that is left to texts not seen so far."""
_MAX_LOG_ODDS = 7.0
_NUM_STEPS, _MAX_STEP = 4, 1.0
_MAX_BATCH = 128
"""Rounds that are learnt from together, once that many are known; fewer at first."""

Floats = npt.NDArray[np.float64]


class SharedAcceptance:
    """Learnt from all streams of a kind: acceptance by position, and the distribution of texts.

    Deep positions are judged in easy texts only, so the raw rate there is biased upwards. The rate is fitted
    together with the beliefs about the texts that were judged, which corrects for that. It is learnt from
    rounds in batches; how a text differs is up to each stream's own belief.

    Attributes:
        num_added: rounds so far.
        reached_likelihoods: [NUM_POSITIONS + 1][num_shifts] that k or more draft tokens are accepted.
        ended_likelihoods: [NUM_POSITIONS][num_shifts] that k are, and the next one is rejected.
        changes: [NUM_POSITIONS + 1][num_shifts, num_shifts] what becomes of a belief, as the text may change
            in a round that accepts k draft tokens.
        prior_belief: [num_shifts] belief about a text before anything is known of it.
    """

    def __init__(self) -> None:
        self.num_added = self._num_learnt = 0
        self._batch: list[tuple[int, int, Floats]] = []
        self._judged = np.zeros((NUM_POSITIONS, len(_SHIFTS)))
        self._accepted = np.zeros(NUM_POSITIONS)
        self._log_odds = np.full(NUM_POSITIONS, _PRIOR_LOG_ODDS)
        self._any = _normalised(np.exp(-0.5 * (_SHIFTS / _SPREAD) ** 2))
        self._seen = self._any.copy()
        self._update()

    def of_trees(self, ratio: float) -> SharedAcceptance:
        """What is believed of trees with so many times the nodes before any was judged, from few rounds."""
        other = copy.copy(self)
        kept = min(1.0, _TEXT_PRIOR_ROUNDS / max(1.0, self._judged[0].sum()))
        other._judged = kept * self._judged + _PRIOR_WEIGHT * self._any
        rates = _logistic(self._log_odds[:, None] + _gain(ratio)[:, None] + _SHIFTS)
        other._accepted = (other._judged * rates).sum(1)
        other._batch, other._seen = [], self._seen.copy()
        other.num_added = other._num_learnt = 0
        other._update()
        return other

    def add(self, num_drafted: int, num_accepted: int, belief: Floats) -> None:
        """One round of any stream, and the belief about its text after it.

        Draft tokens after a rejected one were never judged.
        """
        self._batch.append((min(num_drafted, num_accepted + 1), num_accepted, belief))
        self.num_added += 1
        if len(self._batch) >= min(_MAX_BATCH, 1 + self._num_learnt // 2):
            self._learn()
            self._update()

    def _learn(self) -> None:
        """Of the batch, each round with the same weight."""
        judged, accepted, beliefs = (np.array(column) for column in zip(*self._batch, strict=True))
        is_judged = np.arange(NUM_POSITIONS) < judged[:, None]
        num_judged = is_judged.sum(0)
        num_accepted = (np.arange(NUM_POSITIONS) < accepted[:, None]).sum(0)
        kept = _MEMORY**num_judged
        weight = (
            (1 - kept) / (1 - _MEMORY) / np.maximum(1, num_judged)
        )  # the mean of those one after the other
        self._judged = kept[:, None] * self._judged + weight[:, None] * (is_judged.T @ beliefs)
        self._accepted = kept * self._accepted + weight * num_accepted
        rates = np.maximum(_TEXT_RATE, 1 / (_TEXT_PRIOR_ROUNDS + self._num_learnt + np.arange(len(judged))))
        self._seen += (1 - np.prod(1 - rates)) * (beliefs.mean(0) - self._seen)
        self._num_learnt = self.num_added
        self._batch.clear()

    def reached(self, belief: Floats) -> Floats:
        """[NUM_POSITIONS + 1] probability that at least k draft tokens are accepted."""
        mean: Floats = belief.dot(self._reached)
        return mean

    def tokens(self, ratio: float = 1.0) -> list[float]:
        """[NUM_POSITIONS + 1] mean tokens committed by a round with 0, 1, ... draft tokens; or with trees as
        deep, of so many times the nodes."""
        reached = self._reached if ratio == 1 else _reached(self._log_odds + _gain(ratio))
        return list(accumulate(self._seen.dot(reached).tolist()))

    def _update(self) -> None:
        self.prior_belief = (1 - _UNSEEN_SHARE) * self._seen + _UNSEEN_SHARE * self._any
        self._fit()
        self._reached = _reached(self._log_odds)
        self.reached_likelihoods = list(self._reached.T)
        self.ended_likelihoods = list(-np.diff(self._reached.T, axis=0))
        prior = self.prior_belief[:, None]
        anew = (1 - _OTHER_KIND) * _IS_KIND * prior / (_IS_KIND @ prior) + _OTHER_KIND * prior
        self.changes = [np.diag(kept) + (1 - kept) * anew for kept in _UNCHANGED]

    def _fit(self) -> None:
        """Fit the log odds to the accepted tokens: one value for all positions, then one for each."""
        prior = _PRIOR_WEIGHT * self._any
        judged = self._judged.sum(0, keepdims=True) + prior
        accepted = self._accepted.sum(keepdims=True) + _PRIOR_WEIGHT * PRIOR_ACCEPTANCE
        anywhere = _solve(self._log_odds.mean(keepdims=True), judged, accepted)
        accepted = self._accepted + prior @ _logistic(anywhere + _SHIFTS)
        self._log_odds = _solve(self._log_odds, self._judged + prior, accepted)


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
            self._belief = _normalised(self._belief * likelihoods[num_accepted])
            if is_shared:
                shared.add(num_drafted, num_accepted, self._belief)
        self._belief = shared.changes[num_accepted].dot(self._belief)

    def reached(self, num_drafted: int) -> list[float]:
        """[num_drafted + 1] probability that at least k draft tokens of the next round are accepted."""
        reached: list[float] = self.shared.reached(self._belief).tolist()
        while len(reached) <= num_drafted:
            reached.append(reached[-1] * reached[-1] / (reached[-2] or 1.0))
        return reached[: num_drafted + 1]

    def tokens(self, num_drafted: int) -> list[float]:
        """[num_drafted + 1] mean tokens committed by the next round with 0, 1, ... draft tokens."""
        return list(accumulate(self.reached(num_drafted)))


def _gain(ratio: float) -> Floats:
    """[NUM_POSITIONS] what so many times the nodes add to the log odds of acceptance."""
    gain: Floats = _NODE_GAIN * np.log(ratio) / np.arange(1, NUM_POSITIONS + 1)
    return gain


def _reached(log_odds: Floats) -> Floats:
    """[num_shifts, NUM_POSITIONS + 1] probability that at least k draft tokens are accepted."""
    reached = np.ones((len(_SHIFTS), NUM_POSITIONS + 1))
    np.cumprod(_logistic(log_odds + _SHIFTS[:, None]), axis=1, out=reached[:, 1:])
    return reached


def _logistic(log_odds: Floats) -> Floats:
    rates: Floats = 1 / (1 + np.exp(-log_odds))
    return rates


def _solve(log_odds: Floats, judged: Floats, accepted: Floats) -> Floats:
    """Solve `sum over shifts of judged · logistic(log_odds + shift) = accepted` by Newton's method.

    Args:
        log_odds: [n] initial values.
        judged: [n, num_shifts].
        accepted: [n].

    Returns:
        [n] log odds after a fixed number of steps.
    """
    for _ in range(_NUM_STEPS):
        rates = _logistic(log_odds[:, None] + _SHIFTS)
        slope = (judged * rates * (1 - rates)).sum(1)
        step = (accepted - (judged * rates).sum(1)) / slope
        log_odds = log_odds + np.clip(step, -_MAX_STEP, _MAX_STEP)
        log_odds = np.clip(log_odds, -_MAX_LOG_ODDS, _MAX_LOG_ODDS)
    return log_odds


def _normalised(weights: Floats) -> Floats:
    shares: Floats = weights / weights.dot(_ONES)
    return shares
