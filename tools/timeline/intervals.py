"""Sets of times as sorted, disjoint intervals [start, end); lengths in the unit of the ends."""

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


def difference(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """Times in `left` only; both are unions."""
    if not left:
        return []
    first, last = left[0][0], left[-1][1]
    edges = [first, *(edge for interval in right for edge in interval), last]
    gaps = [gap for gap in zip(edges[::2], edges[1::2], strict=True) if gap[0] < gap[1]]
    return intersection(left, gaps)


def length(intervals: list[Interval]) -> int:
    """Total length of a union."""
    return sum(end - start for start, end in intervals)
