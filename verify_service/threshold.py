"""Where a proposal ends: after a token of which the draft was not sure enough. Pure.

    rate      ← 0.5 · rate + 0.5 · accepted / drafted
    threshold ← threshold ± 0.001      up while the rate is below its target, down otherwise

Source: Zhang et al. 2023 (arXiv 2309.08168), and its reference code: steps of 0.01, smoothed by
0.9; it stays where the rate is high and the proposal was as long as it might be. It begins at
0.8 there too; what other values are worth: benchmarks/results/layers.md.
"""

from __future__ import annotations

_RATE_MEMORY, _MEMORY = 0.5, 0.9
_STEP = 0.01
_FIRST, _TARGET_RATE = 0.8, 0.9
"""Value that it begins at; accepted share of draft tokens above which it falls."""


class Threshold:
    """Of one sequence. It follows from the sequence's own past alone: a seed that is given twice meets no
    choice that knows its random numbers.

    Attributes:
        value: of the draft's confidence, in [0, 1].
    """

    def __init__(self, first: float = _FIRST) -> None:
        self.value = first
        self._rate = 0.0

    def learn(self, num_accepted: int, num_drafted: int, *, was_longest: bool) -> None:
        """A proposal of at least one token was judged.

        Args:
            was_longest: it ended because no more tokens were wanted.
        """
        self._rate = _RATE_MEMORY * self._rate + (1 - _RATE_MEMORY) * num_accepted / num_drafted
        step = 0.0 if was_longest else -_STEP
        if self._rate < _TARGET_RATE:
            step = _STEP
        self.value = min(1.0, max(0.0, self.value + (1 - _MEMORY) * step))
