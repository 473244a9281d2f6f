"""Copies among slots that the next forward pass does first. No torch, no device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specwire.core import IntArray


class SlotCopies(NamedTuple):
    """Slot `src[i]` goes to slot `dst[i]`, for all i at once; int64 [n] each, no `dst` occurs twice."""

    src: IntArray
    dst: IntArray


class PendingCopies:
    """Copies that the bookkeeping has counted as done, and that no pass has done yet.

    They hold for the pages as they were when each was added: a copy from the destination of an earlier one
    is a copy from that one's source, and the last copy to a slot wins. A page may change hands before the
    pass, since copies come before all writes.
    """

    def __init__(self) -> None:
        self._sources: dict[int, int] = {}

    @property
    def slots(self) -> Iterable[int]:
        """The destinations."""
        return self._sources.keys()

    def add(self, src: Iterable[int], dst: Iterable[int]) -> None:
        """Copy slots `src` to slots `dst`, all at once, after all copies added before."""
        sources = [self._sources.get(slot, slot) for slot in src]
        self._sources.update(zip(dst, sources, strict=True))

    def take(self) -> SlotCopies | None:
        """All of them, which are then no longer pending; None without any."""
        if not self._sources:
            return None
        num = len(self._sources)
        src = np.fromiter(self._sources.values(), np.int64, num)
        dst = np.fromiter(self._sources.keys(), np.int64, num)
        self._sources.clear()
        return SlotCopies(src, dst)

    def forget(self) -> None:
        """Drop them, since what the slots held is lost."""
        self._sources.clear()
