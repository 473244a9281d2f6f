"""What sequences teach a draft: the tokens that the target chose, in windows. No torch.

    tokens   ├─ prompt ─┤├─ handed over ─┤├─ labels ─┤├─ too few yet ─┤
    window           ├────── context ────┤├─ labels ─┤

Prompts and draft tokens are no labels: the target chose neither.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specwire.support import IntArray

WINDOW_LEN = 256
"""Most tokens of a window."""
NUM_LABELS = 128
"""Labels of a window, fewer at the end of a sequence."""
MIN_LABELS = 4
"""A sequence that ends with fewer teaches no more."""


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
        if not is_fresh:
            place = self._random.randrange(len(self._studied))
            window = self._studied[place]
            del self._studied[place]
            return window, False
        window = self._fresh.pop()
        self._studied.extend([window] * self._num_repeats)
        return window, True
