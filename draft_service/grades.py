"""Whether what a draft has learnt is better than what it serves with. No torch.

Both are tested on tokens of the target before the draft learns from them. The score of a draft distribution q
for the target's token x is 2 q(x) - Σ q², the quadratic score: on average it is the highest where q is the
target's distribution, and lower by Σ (target - q)². So sharper guesses that are no better do not win.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

MIN_LABELS = 512
"""Fewer tokens decide nothing."""
MAX_GRADES = 64
"""The latest ones decide."""
NUM_ERRORS = 2.0
"""Standard errors that a difference has to be away from 0."""


class Grade(NamedTuple):
    """A test on one window; sums over its labels.

    Attributes:
        num_labels: tokens of the target.
        gain: score of what was learnt less that of what is served.
        agreement: probability that the served weights give to the token, at the request's temperature.
    """

    num_labels: int
    gain: float
    agreement: float


class Grades:
    """The grades since the last decision, and agreement over longer.

    Attributes:
        num_labels: of all grades.
    """

    def __init__(self) -> None:
        self.num_labels = 0
        self._recent: deque[Grade] = deque(maxlen=MAX_GRADES)
        self._undecided: deque[Grade] = deque(maxlen=MAX_GRADES)
        self._first = (0, 0.0)
        self._is_first = True

    def add(self, grade: Grade) -> None:
        self.num_labels += grade.num_labels
        self._recent.append(grade)
        self._undecided.append(grade)
        if self._is_first:
            num_labels, agreement = self._first
            self._first = num_labels + grade.num_labels, agreement + grade.agreement

    @property
    def first_agreement(self) -> float:
        """See `core.Learning`."""
        num_labels, agreement = self._first
        return agreement / max(1, num_labels)

    @property
    def agreement(self) -> float:
        """See `core.Learning`."""
        return sum(each.agreement for each in self._recent) / max(
            1, sum(each.num_labels for each in self._recent)
        )

    def decide(self) -> bool | None:
        """Whether what was learnt is better; None while that is open. A decision begins anew."""
        num_labels = sum(each.num_labels for each in self._undecided)
        if num_labels < MIN_LABELS:
            return None
        # Mean gain of a token and its standard error, from the spread between windows.
        gain = sum(each.gain for each in self._undecided) / num_labels
        squares = sum((each.gain - gain * each.num_labels) ** 2 for each in self._undecided)
        if abs(gain) <= NUM_ERRORS * math.sqrt(squares) / num_labels:
            return None
        self._undecided.clear()
        self._is_first &= gain < 0
        return gain > 0
