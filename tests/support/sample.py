"""`@pytest.mark.sample(n)`: n of a test's cases are in `make test`, and all of them in `make test-all`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count as count_from
from math import gcd

import pytest


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark the other cases; none of those that are slow anyway is chosen."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_test in cases.values():
        [count] = next(of_test[0].iter_markers("sample")).args
        kept = chosen(len(of_test), count)
        for place, item in enumerate(of_test):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


def chosen(num_cases: int, count: int) -> set[int]:
    """Places of cases, the first among them, in steps that have no divisor in common with their number: in a
    table of settings by rules they lie in different rows and columns."""
    step = next(each for each in count_from(round(0.62 * num_cases) or 1) if gcd(each, num_cases) == 1)
    return {place * step % num_cases for place in range(min(count, num_cases))}
