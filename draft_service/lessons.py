"""What sequences teach a draft, and whether it is better for it. No torch.

    tokens   ├─ prompt ─┤├─ handed over ─┤├─ labels ─┤├─ too few yet ─┤
    window           ├────── context ────┤├─ labels ─┤

The tokens that the target chose are labels; prompts and draft tokens are none, as it chose neither.
What was learnt and what is served are both tested on a window before the draft learns from it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specwire.support import IntArray

WINDOW_LEN = 256
"""Most tokens of a window."""
NUM_LABELS = 128
"""Labels of a window, fewer at the end of a sequence."""
MIN_LABELS = 4
"""A sequence that ends with fewer teaches no more."""
MIN_TESTED = 512
"""Fewer labels decide nothing."""
MAX_GRADES = 64
"""The latest ones decide."""
NUM_ERRORS = 2.0
"""Standard errors that a difference has to be away from 0."""


class Window(NamedTuple):
    """Tokens that follow one another, the last ones chosen by the target.

    Attributes:
        token_ids: int64 [n].
        start: position of the first one.
        num_labels: how many of the last ones are the target's; less than n.
        temperature: that they were drawn at; 0 for the likeliest.
    """

    token_ids: IntArray
    start: int
    num_labels: int
    temperature: float


class Lesson:
    """The committed tokens of one sequence.

    Args:
        prompt_len: tokens that the client gave.
        temperature: as of a `Window`.
        hand_over: called with each window.
    """

    def __init__(self, prompt_len: int, temperature: float, hand_over: Callable[[Window], None]) -> None:
        self._tokens: list[int] = []
        self._num_handed_over = max(1, prompt_len)  # the first token follows nothing
        self._temperature = temperature
        self._hand_over = hand_over

    def commit(self, base_len: int, token_ids: Sequence[int], drafted: Sequence[int] = ()) -> None:
        """Tokens of a request.

        Args:
            drafted: the draft tokens after those that are held; those before `base_len` are committed.
        """
        held = self._tokens
        held += drafted[: max(0, base_len - len(held))]
        if len(held) < base_len:
            return  # the request will be refused
        held[base_len:] = token_ids
        while len(held) - self._num_handed_over >= NUM_LABELS:
            self._cut(self._num_handed_over + NUM_LABELS)

    def close(self) -> None:
        if len(self._tokens) - self._num_handed_over >= MIN_LABELS:
            self._cut(len(self._tokens))

    def _cut(self, end: int) -> None:
        num_labels, start = end - self._num_handed_over, max(0, end - WINDOW_LEN)
        self._num_handed_over = end
        token_ids = np.array(self._tokens[start:end], np.int64)
        self._hand_over(Window(token_ids, start, num_labels, self._temperature))


class Windows:
    """The latest windows: the newest one that was not studied, and older ones again, in turns.

    Args:
        capacity: most that are kept, of those that were studied and of those that were not.
        num_repeats: how often a window is studied again.
    """

    def __init__(self, capacity: int, num_repeats: int) -> None:
        self._fresh: deque[Window] = deque(maxlen=capacity)
        self._studied: deque[Window] = deque(maxlen=capacity * max(1, num_repeats))  # as often as they recur
        self._num_repeats = num_repeats
        self._random = random.Random(0)
        self._is_freshs_turn = True

    def __len__(self) -> int:
        """Times that a window will be studied."""
        return len(self._fresh) + len(self._studied)

    def add(self, window: Window) -> None:
        """A new one; the oldest is dropped where there are too many."""
        self._fresh.append(window)

    def take(self) -> tuple[Window, bool]:
        """A window, and whether it was never taken before; there must be one."""
        is_fresh = bool(self._fresh) and (self._is_freshs_turn or not self._studied)
        self._is_freshs_turn = not is_fresh
        if is_fresh:
            window = self._fresh.pop()
            self._studied.extend([window] * self._num_repeats)
        else:
            place = self._random.randrange(len(self._studied))
            window = self._studied[place]
            del self._studied[place]
        return window, is_fresh


class Grade(NamedTuple):
    """A test on one window; sums over its labels.

    The score of a draft distribution q for the target's token x is 2 q(x) - Σ q², the quadratic score: on
    average it is the highest where q is the target's distribution, and lower by Σ (target - q)². So sharper
    guesses that are no better do not win.

    Attributes:
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
        first_agreement: see `core.Learning`.
    """

    def __init__(self) -> None:
        self.num_labels = 0
        self.first_agreement = 0.0
        self._recent: deque[Grade] = deque(maxlen=MAX_GRADES)
        self._undecided: deque[Grade] = deque(maxlen=MAX_GRADES)
        self._is_first = True  # no decision was for what was learnt

    def add(self, grade: Grade) -> None:
        if self._is_first:
            agreed = self.first_agreement * self.num_labels + grade.agreement
            self.first_agreement = agreed / max(1, self.num_labels + grade.num_labels)
        self.num_labels += grade.num_labels
        self._recent.append(grade)
        self._undecided.append(grade)

    @property
    def agreement(self) -> float:
        """See `core.Learning`."""
        return sum(grade.agreement for grade in self._recent) / max(1, _num_labels(self._recent))

    def decide(self) -> bool | None:
        """Whether what was learnt is better; None while that is open. A decision begins anew."""
        num_labels = _num_labels(self._undecided)
        if num_labels < MIN_TESTED:
            return None
        # Mean gain of a token and its standard error, from the spread between windows.
        gain = sum(grade.gain for grade in self._undecided) / num_labels
        squares = sum((grade.gain - gain * grade.num_labels) ** 2 for grade in self._undecided)
        if abs(gain) <= NUM_ERRORS * math.sqrt(squares) / num_labels:
            return None
        self._undecided.clear()
        self._is_first &= gain < 0
        return gain > 0


def _num_labels(grades: Iterable[Grade]) -> int:
    return sum(grade.num_labels for grade in grades)
