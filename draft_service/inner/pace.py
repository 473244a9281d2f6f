"""How many guesses of a stream a pass of the draft runs, from how they fared and what passes cost. Pure.

It may look at anything: guesses decide how soon a proposal is there, never what it holds, and where tokens
are matched no rule depends on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from specwire.proposals.estimate.rates import Rate, best_length, expected_tokens
from specwire.proposals.history import Guess

MOST_GUESSES = 16
"""In one pass."""
_MEMORY, _SHARED_MEMORY = 0.97, 0.995
"""Of acceptance, from pass to pass: with a shorter one the prior would outweigh guesses that are wrong."""
_LEAST_GAIN = 1.03
"""Tokens a second of a pass with guesses over one without, where guesses are run."""
_LEAST_REST, _MOST_REST = 15, 255
"""Passes between two trials, where they cost next to nothing, and where they cost several passes."""
_TRIAL_SHARE = 0.01
"""Most time that trials may take."""


class Pace:
    """Of one stream: few guesses where they are wrong, and hardly a look where they do not pay.

    Where none are worth it, looks become rarer, and then one guess is run at each as a trial. After one that
    was right the next one comes sooner.

    Args:
        shared: acceptance by kind in all streams that sample alike, which a new stream begins with.
    """

    def __init__(self, shared: dict[int, Rate] | None = None) -> None:
        self._shared = {} if shared is None else shared
        self._rates: dict[int, Rate] = {}
        self._rest = self._num_rested = 0

    def is_due(self) -> bool:
        """Whether to look for guesses before the next pass; called once for each."""
        if self._num_rested < self._rest:
            self._num_rested += 1
            return False
        self._num_rested = 0
        return True

    def num_guesses(self, look: Guess | None, times: Sequence[float]) -> int:
        """How many to run: so many as promise the most tokens a second.

        Args:
            look: None where nothing is known.
            times: [most + 1] of a pass by number of guesses, in any unit; most is at least 1.
        """
        if look is not None and (num := self._best(look, times)):
            self._rest = 0
            return num
        longest = min(max(_LEAST_REST, ceil((times[1] / times[0] - 1) / _TRIAL_SHARE)), _MOST_REST)
        is_trial = look is not None and self._rest >= longest
        self._rest = min(longest, 2 * self._rest + 1)
        return int(is_trial)

    def _best(self, look: Guess, times: Sequence[float]) -> int:
        usual = self._shared.setdefault(look.kind, Rate(look.prior, _SHARED_MEMORY))
        rate = self._rates.setdefault(look.kind, Rate(usual.value, _MEMORY))
        expected = expected_tokens([rate.value] * (len(times) - 1))
        return best_length(expected, [times[0], *(_LEAST_GAIN * time for time in times[1:])])

    def add(self, kind: int, num_right: int, num_guessed: int) -> None:
        """So many of the guesses that were run were the draft's own tokens, up to the first that was not."""
        for rate in (self._rates[kind], self._shared[kind]):
            rate.add(num_right, min(num_right + 1, num_guessed))
        if num_right:
            self._num_rested = self._rest // 2
