"""The free pages of a pool. No torch, no device."""

from __future__ import annotations

import heapq


class FreeIntervals:
    """Free pages as maximal intervals, with access to the largest one.

    Every operation is O(log n) amortised: intervals are found by either end, and the heap by size keeps stale
    entries until they reach the top or outnumber the current ones.
    """

    def __init__(self, num_pages: int) -> None:
        self.ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._insert(0, num_pages)

    def _insert(self, start: int, end: int) -> None:
        if start == end:
            return
        self.ends[start] = end
        self._starts[end] = start
        if len(self._by_size) > 64 + 4 * len(self.ends):
            self._by_size = [(s - e, s) for s, e in self.ends.items()]
            heapq.heapify(self._by_size)
        else:
            heapq.heappush(self._by_size, (start - end, start))

    def _remove(self, start: int) -> int:
        end = self.ends.pop(start)
        del self._starts[end]
        return end

    def largest(self) -> tuple[int, int]:
        """The largest interval as (start, end). Must not be called when nothing is free."""
        while True:
            negative_size, start = self._by_size[0]
            if self.ends.get(start) == start - negative_size:
                return start, start - negative_size
            heapq.heappop(self._by_size)

    def take(self, start: int, begin: int, end: int) -> None:
        """Cut pages [begin, end) out of the interval that starts at `start`."""
        old_end = self._remove(start)
        self._insert(start, begin)
        self._insert(end, old_end)

    def give(self, page: int) -> None:
        """Add one page, merging it with its neighbours."""
        start = self._starts.get(page, page)
        if start != page:
            self._remove(start)
        end = self._remove(page + 1) if page + 1 in self.ends else page + 1
        self._insert(start, end)
