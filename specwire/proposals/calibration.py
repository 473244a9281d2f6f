"""How likely the draft's candidates are the target's, given what the draft's own scores say. Pure.

A draft is surer, or less sure, of its candidates than it should be. So it is counted how often a candidate
was the target's token, by its rank and by ranges of the share that the draft gives it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

NUM_RANKS = 8
"""Candidates at each position that are counted."""
_EDGES = np.array([0.003, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97])
_MIDDLES = np.concatenate([[_EDGES[0] / 2], np.sqrt(_EDGES[:-1] * _EDGES[1:]), [(_EDGES[-1] + 1) / 2]])
_EDGE_LIST: list[float] = _EDGES.tolist()
_PRIOR_WEIGHT = 4.0
"""Weight of the draft's own share, in judgements."""
_MEMORY = 0.995
"""Decay of a judgement's weight with each later one of its rank: texts change."""


class Calibration:
    """Learnt from all streams of a kind."""

    def __init__(self) -> None:
        self._judged = np.zeros((NUM_RANKS, len(_MIDDLES)))
        self._right = np.zeros((NUM_RANKS, len(_MIDDLES)))
        self._found = self._estimates()

    def probabilities(self, shares: Sequence[float]) -> list[float]:
        """The probability that the target takes each of a position's candidates.

        Args:
            shares: by rank, best first, what the draft's scores say; at most NUM_RANKS.
        """
        return [self._found[rank][bisect_right(_EDGE_LIST, share)] for rank, share in enumerate(shares)]

    def add(self, shares: Sequence[float], rank: int | None) -> None:
        """The target has decided at a position; `rank` is None where no candidate was its token."""
        ranks, ranges = np.arange(len(shares)), np.searchsorted(_EDGES, shares, side="right")
        self._judged[ranks] *= _MEMORY
        self._right[ranks] *= _MEMORY
        self._judged[ranks, ranges] += 1
        if rank is not None:
            self._right[rank, ranges[rank]] += 1
        self._found = self._estimates()

    def _estimates(self) -> list[list[float]]:
        """Probabilities by rank and range, as lists: they are looked up for every node of every tree."""
        found: list[list[float]] = (
            (self._right + _PRIOR_WEIGHT * _MIDDLES) / (self._judged + _PRIOR_WEIGHT)
        ).tolist()
        return found
