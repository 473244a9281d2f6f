"""Sets of times as sorted, disjoint intervals [start, end)."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Any intervals to sorted, disjoint ones without empty ones."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def gaps(whole: Interval, intervals: Iterable[Interval]) -> list[Interval]:
    """What any intervals leave of one."""
    found, (at, end) = [], whole
    for first, last in union(intervals):
        if at < min(first, end):
            found.append((at, min(first, end)))
        at = max(at, last)
    return [*found, (at, end)] if at < end else found


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Times in both; both are unions."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found
