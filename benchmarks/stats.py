"""Medians and spreads of repeated measurements, and ratios taken within a repetition."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, least and greatest of some repetitions."""

    median: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        """`median (low to high)` with so many decimals."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def summarise(values: Sequence[float]) -> Summary:
    """Of at least one value."""
    return Summary(statistics.median(values), min(values), max(values))


def ratios(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """value / reference, repetition by repetition: what slows both of one repetition cancels out.

    Raises:
        ValueError: not the same number of repetitions.
    """
    return [value / reference for value, reference in zip(values, references, strict=True)]
