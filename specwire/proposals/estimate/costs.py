"""Cost models fitted online: time as a linear function of the work done. Pure: no clock, no I/O."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_RATE = 0.2
_MAX_JUMP = 4.0
_OLD = 0.99
_REFIT_EVERY = 32
_MIN_IMPROVEMENT = 1e-4
_ASSUMED_WEIGHT = 0.1
"""Of a cost that was measured before the first observation, beside the latest ones."""


@dataclass(slots=True)
class _Sample:
    """An exponential moving average of similar observations, and the number of the last one."""

    features: Sequence[float]
    cost: float
    last: int


class CostModel:
    """cost = base + sum of (rate_i * feature_i), all terms non-negative, fitted to relative errors.

    Observations of similar size (to a power of two) form one sample, so that frequent operations do not
    outweigh rare ones, such as a long prompt; older samples weigh less, in the end nothing. While all
    samples are alike the rates cannot be told from the base: then all cost is base, which is optimistic
    about larger operations, and the first of those corrects it.

    Attributes:
        base, rates: in the unit of the costs; 0 before the first observation.
    """

    def __init__(self, num_features: int) -> None:
        self._samples: dict[tuple[int, ...], _Sample] = {}
        self._assumed: list[_Sample] = []
        self._assumed_terms = np.zeros(1 + num_features)
        self._num_added = 0
        self._bounds: dict[tuple[float, ...], float] = {}  # by features and margin, since the last fit
        self.base = 0.0
        self.rates = (0.0,) * num_features

    def assume(self, measured: Sequence[tuple[Sequence[float], float]]) -> None:
        """Costs that were measured before the first observation, by features.

        Observations correct all of them by the same factor: these say how costs of different sizes compare.
        """
        self._assumed = [_Sample(features, cost, 0) for features, cost in measured]
        self._assumed_terms = _fitted(self._assumed, np.ones(len(self._assumed)))
        self._fit()

    def add(self, features: Sequence[float], cost: float) -> None:
        """Add an observation; features must be at least 0, the cost greater than 0."""
        key = tuple(int(1 + feature).bit_length() for feature in features)
        self._num_added += 1
        sample = self._samples.get(key)
        if sample is None:
            if self._assumed:  # what is done for the first time, such as capturing a pass, is an outlier too
                cost = min(cost, _MAX_JUMP * max(1.0, self.predict(features)))
            self._samples[key] = _Sample(features, cost, self._num_added)
        else:
            pairs = zip(sample.features, features, strict=True)
            sample.features = [old + _RATE * (new - old) for old, new in pairs]
            # A single pause of the machine is an outlier.
            sample.cost += _RATE * (min(cost, _MAX_JUMP * sample.cost) - sample.cost)
            sample.last = self._num_added
        if sample is None or self._num_added % min(_REFIT_EVERY, 1 + self._num_added // 4) == 0:
            self._fit()

    @property
    def known_base(self) -> float:
        """At least 1 once anything was measured, where 0 says that nothing was: costs may be in proportion to
        what is computed."""
        return max(1.0, self.base) if self.base or any(self.rates) else 0.0

    def predict(self, features: Sequence[float]) -> float:
        """Expected cost; 0 before the first observation."""
        expected: float = self.base + sum(map(operator.mul, self.rates, features))
        return expected

    def bound(self, features: Sequence[float], margin: float = 1.0) -> float:
        """An upper estimate of the cost from the observations; 0 before the first one.

        `margin` times the cost of the cheapest sample that is at least as large in every feature. Beyond the
        largest samples the estimate grows in proportion, for each feature that is larger, once that is more
        than the margin: costs have a part that does not grow.
        """
        key = *features, margin
        found = self._bounds.get(key)
        if found is None:
            found = self._bounds[key] = self._bound(features, margin)
        return found

    def _bound(self, features: Sequence[float], margin: float) -> float:
        samples = self._samples.values()
        if not samples:
            return 0.0
        larger = [s.cost for s in samples if all(map(operator.ge, s.features, features))]
        seen = min(larger) if larger else max(s.cost for s in samples)
        largest = [max(s.features[i] for s in samples) for i in range(len(features))]
        ratio = math.prod(max(1.0, f / max(1.0, most)) for f, most in zip(features, largest, strict=True))
        return max(margin, ratio) * max(self.predict(features), seen)

    def _fit(self) -> None:
        self._bounds.clear()
        samples = [*self._samples.values()]
        weights = [_OLD ** (self._num_added - sample.last) for sample in samples]
        level = 1.0
        if samples and self._assumed:
            expected = [float(self._assumed_terms @ [1.0, *sample.features]) for sample in samples]
            ratios = [math.log(s.cost / max(1.0, e)) for s, e in zip(samples, expected, strict=True)]
            level = math.exp(np.average(ratios, weights=weights))
        assumed = [_Sample(each.features, level * each.cost, 0) for each in self._assumed]
        weights += [_ASSUMED_WEIGHT if samples else 1.0] * len(assumed)
        self.base, *rates = _fitted([*samples, *assumed], np.array(weights)).tolist()
        self.rates = tuple(rates)


def _fitted(samples: Sequence[_Sample], weights: Floats) -> Floats:
    """[1 + num_features] by non-negative least squares: the best subset of terms without a negative one."""
    costs = np.array([s.cost for s in samples])
    scale = np.sqrt(weights) / costs
    rows = np.array([[1.0, *s.features] for s in samples]) * scale[:, None]
    wanted = costs * scale
    best, coefficients = math.inf, np.zeros(rows.shape[1])
    for terms in _term_sets(rows.shape[1]):
        found, *_ = np.linalg.lstsq(rows[:, terms], wanted, rcond=None)
        if (found < 0).any():
            continue
        error = float(np.square(rows[:, terms] @ found - wanted).sum() / weights.sum())
        if error < best - _MIN_IMPROVEMENT:
            best, coefficients = error, np.zeros(rows.shape[1])
            coefficients[list(terms)] = found
    return coefficients


def _term_sets(num_terms: int) -> list[list[int]]:
    """All subsets of terms, smaller ones first, and among those of one size the ones with the base first."""
    every = range(num_terms)
    return [list(terms) for size in range(1, num_terms + 1) for terms in itertools.combinations(every, size)]
