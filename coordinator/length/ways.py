"""Ways to decode, and how much slower each is than its modelled cost. Pure: no clock, no network.

A model of costs does not know everything: draft and target may share a processor, streams take turns, a
network is slow. What it misses has causes that ways have in common. So the logarithm of measured over
modelled time is believed to be a Gaussian process over ways, numbers of streams and time: its prior mean is
0, and a measurement of one way says something of all others that share a cause with it (Rasmussen and
Williams 2006, section 2.2). Part of the deviation lasts, part of it passes soon: after a pause of the
machine, what is known of its usual state comes back by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Way(NamedTuple):
    """How the rounds of all streams are drafted.

    Attributes:
        num_nodes: of trees; 0 for chains.
        cap: most draft tokens one after another; 0 decodes plainly.
        prepares: whether the draft prepares for outcomes during verify passes.
    """

    num_nodes: int = 0
    cap: int = 0
    prepares: bool = False

    def __str__(self) -> str:
        if not self.cap:
            return "plain"
        shape = f"trees of {self.num_nodes}" if self.num_nodes else "chains"
        return f"{shape} up to {self.cap}{', prepared' if self.prepares else ''}"


CAPS = (2, 4, 8, 16)
"""Many streams need them: what one drafts slows the others."""
MAX_CHOSEN = CAPS[-1]
"""Most draft tokens one after another that are ever chosen."""
CHAIN, TREES, TREE_CAPS = 0, (16, 32, 64), CAPS[-2:]
PLAIN = Way()
WAYS = (
    PLAIN,
    *(Way(CHAIN, cap, prepares) for prepares in (False, True) for cap in CAPS),
    *(Way(nodes, cap, prepares) for prepares in (False, True) for nodes in TREES for cap in TREE_CAPS),
)

# Standard deviations of what a model misses, in logarithms of time, by cause.
_ALL, _DRAFTS, _PREPARES, _TREES, _OWN = 0.3, 0.5, 0.3, 0.2, 0.1
_PASSING, _PASSING_DRAFTS, _PASSING_OWN = 0.2, 0.2, 0.05
"""Of what passes: of all ways; again of those that draft, by a service, which may be paused or cut off alone,
and by the target itself."""
_LASTS_S, _PASSES_S = 400.0, 4.0
"""Seconds after which correlation has fallen to a third."""
_OCTAVE = 4.0
"""Doublings of the number of streams that change it as much."""
_NOISE = 0.05
"""Of a measurement: blocks of twelve rounds on two quiet cores differ by so much."""
_MOST = math.log(4.0)
"""No measurement counts for more than so far from the middle one: four times as slow rules a way out as well
as thirty times, and is sooner forgotten."""
_MAX_IN_A_ROW, _MAX_SEEN = 4, 96
"""Measurements that are kept of one way in a row, and of all: a trial is compared with what was around it."""

Floats = npt.NDArray[np.float64]


@dataclass
class Seen:
    """Rounds that were measured together.

    Attributes:
        num_streams: that ran.
        num_sequences: of a verify pass, on the average.
        at: when, in seconds.
        steps: how many rounds had so many draft tokens one after another.
        num_tokens: that they committed.
    """

    way: Way
    num_streams: int
    num_sequences: float
    at: float
    steps: dict[int, int] = field(default_factory=dict)
    time_ns: float = 0.0
    num_tokens: int = 0

    @property
    def num_rounds(self) -> int:
        """Of all streams."""
        return sum(self.steps.values())


class Beliefs:
    """What measurements say of all ways."""

    def __init__(self) -> None:
        self._seen: list[Seen] = []
        self._passing_drafts = _PASSING_DRAFTS

    def drafted_by_target(self) -> None:
        """The target drafts by itself."""
        self._passing_drafts = _PASSING_OWN

    def last(self, way: Way) -> Seen | None:
        """The latest measurement of a way."""
        return next((seen for seen in reversed(self._seen) if seen.way == way), None)

    def add(self, seen: Seen) -> None:
        """A measurement, the latest so far."""
        row = self._seen[-_MAX_IN_A_ROW:]
        if [each.way for each in row] == [seen.way] * _MAX_IN_A_ROW:
            self._seen.remove(row[1])
        self._seen.append(seen)
        del self._seen[:-_MAX_SEEN]

    def of(
        self, ways: Sequence[Way], num_streams: int, now: float, modelled_ns: Callable[[Seen], float]
    ) -> tuple[Floats, Floats]:
        """[n] mean and [n, n] covariance of log(measured / modelled time) of ways, now.

        Args:
            modelled_ns: of the rounds of a measurement, by what is known of costs today.
        """
        asked = np.array([_point(way, num_streams, now) for way in ways])
        prior = self._covariance(asked, asked)
        if not self._seen:
            return np.zeros(len(ways)), prior
        points = np.array([_point(seen.way, seen.num_streams, seen.at) for seen in self._seen])
        found = np.array([math.log(seen.time_ns / modelled_ns(seen)) for seen in self._seen])
        middle = float(np.median(found))
        found = np.clip(found, middle - _MOST, middle + _MOST)
        known = self._covariance(points, points) + _NOISE**2 * np.eye(len(points))
        shared = self._covariance(asked, points)
        gain = np.linalg.solve(known, shared.T).T
        return gain @ found, prior - gain @ shared.T

    def _covariance(self, a: Floats, b: Floats) -> Floats:
        def both(column: int) -> Floats:
            return a[:, None, column] * b[None, :, column]

        def apart(column: int) -> Floats:
            return np.abs(a[:, None, column] - b[None, :, column])

        is_kind = (apart(0) + apart(1) + apart(2) == 0) * np.exp(-apart(3) - apart(4))
        lasting = (
            _ALL**2 + _DRAFTS**2 * both(0) + _PREPARES**2 * both(1) + _TREES**2 * both(2) + _OWN**2 * is_kind
        )
        lasting = lasting * np.exp(-apart(5) / _OCTAVE - apart(6) / _LASTS_S)
        passing = _PASSING**2 + self._passing_drafts**2 * both(0)
        found: Floats = lasting + passing * np.exp(-apart(6) / _PASSES_S)
        return found


def _point(way: Way, num_streams: int, at: float) -> tuple[float, ...]:
    """drafts, prepares, is a tree, doublings of its cap, of its nodes, of streams, time."""
    nodes, cap, prepares = way
    sizes = math.log2(cap or 1), math.log2(nodes or 1), math.log2(num_streams)
    return (cap > 0, prepares, nodes > 0, *sizes, at)
