"""Ways to decode, and how much slower each is than its modelled cost. Pure: no clock, no network.

A model of costs does not know everything: draft and target may share a processor, streams take turns, a
network is slow. What it misses has causes that ways have in common. So the logarithm of measured over
modelled time is the sum of one deviation for each cause, and a measurement of one way says something of all
others that share a cause with it: a Kalman filter (Rasmussen and Williams 2006, section 2.2, is the same with
all measurements kept). Deviations return to 0 with time, some soon: after a pause of the machine, what is
known of its usual state comes back by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Way(NamedTuple):
    """How the rounds of all streams are drafted.

    Attributes:
        drafts: whether anything is; each stream drafts as many tokens as suit its text.
        num_nodes: of trees; 0 for chains.
        prepares: whether the draft prepares for outcomes during verify passes.
    """

    drafts: bool = False
    num_nodes: int = 0
    prepares: bool = False

    def __str__(self) -> str:
        if not self.drafts:
            return "plain"
        shape = f"trees of {self.num_nodes}" if self.num_nodes else "chains"
        return f"{shape}{', prepared' if self.prepares else ''}"


MAX_CHOSEN = 16
"""Most draft tokens one after another that are ever chosen."""
CHAIN, TREES = 0, (16, 32, 64)
PLAIN = Way()
WAYS = (PLAIN, *(Way(True, nodes, prepares) for prepares in (False, True) for nodes in (CHAIN, *TREES)))

_LASTING, _PASSING = (0.3, 0.5, 0.3, 0.2), (0.2, 0.2)
"""Standard deviations by cause, in the order of `_causes`, in logarithms of time."""
_LASTS_S, _PASSES_S, _OCTAVES = 400.0, 4.0, 4.0
"""Seconds after which a deviation has fallen to a third, one that lasts and one that passes, and doublings of
the number of streams."""
_OWN, _NOISE = 0.1, 0.1
"""Standard deviations of what is a way's own, and of a measurement: blocks on two quiet cores are 0.93 to
1.19 times as long as modelled. With 0.05 the first block of each way was believed for too long."""
_MOST = math.log(4.0)
"""No measurement counts for more than this: four times as slow rules a way out as well as thirty times, and
is sooner forgotten."""

Floats = npt.NDArray[np.float64]


class Moment(NamedTuple):
    """When, with how many streams, and what a pass of one token is believed to cost then."""

    now_s: float
    num_streams: int
    pass_ns: float


class Deviations:
    """What measurements say of all ways: the logarithm of measured over modelled time, by cause.

    The causes: all rounds; those that draft; with outcomes prepared; with trees; again all, and those that
    draft by a service, which may be paused or cut off alone, of what passes soon; and each way by itself.
    """

    def __init__(self, *, in_target: bool = False) -> None:
        """Args:
        in_target: the target drafts by itself.
        """
        passing = _PASSING[0], 0.0 if in_target else _PASSING[1]
        spreads = [*_LASTING, *passing, *[_OWN] * len(WAYS)]
        lasts = [_LASTS_S] * len(_LASTING) + [_PASSES_S] * len(passing) + [_LASTS_S] * len(WAYS)
        self._variances, self._lasts_s = np.square(spreads), np.array(lasts)
        self._mean, self._covariance = np.zeros(len(spreads)), np.diag(self._variances)
        self._at: Moment | None = None

    def add(self, way: Way, ratio: float, at: Moment) -> None:
        """Rounds of a way took so many times their modelled time."""
        mean, covariance = self._moved(at)
        causes = _causes(way)
        found = min(_MOST, max(-_MOST, math.log(ratio)))
        shared = covariance @ causes
        gain = shared / (causes @ shared + _NOISE**2)
        self._mean = mean + gain * (found - causes @ mean)
        self._covariance = covariance - np.outer(gain, shared)
        self._at = at

    def of(self, ways: Sequence[Way], at: Moment) -> tuple[Floats, Floats]:
        """[n] mean and [n, n] covariance of ways."""
        mean, covariance = self._moved(at)
        causes = np.array([_causes(way) for way in ways])
        return causes @ mean, causes @ covariance @ causes.T

    def _moved(self, at: Moment) -> tuple[Floats, Floats]:
        """What is known of all causes there. Where passes are said to cost more than they were, what was
        measured is a smaller multiple of it: times are what is believed."""
        before = self._at or at
        octaves = abs(math.log2(at.num_streams / before.num_streams))
        kept = np.exp(-(at.now_s - before.now_s) / self._lasts_s - octaves / _OCTAVES)
        found: Floats = np.outer(kept, kept) * self._covariance + np.diag((1 - kept**2) * self._variances)
        mean: Floats = kept * self._mean
        mean[0] -= math.log(at.pass_ns / before.pass_ns)
        return mean, found


def _causes(way: Way) -> Any:
    drafts, nodes, prepares = way
    own = [float(way == each) for each in WAYS]
    return np.array([1.0, drafts, prepares, nodes > 0, 1.0, drafts, *own])
