"""Copies among slots that the next forward pass does first. No torch, no device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specwire.support import IntArray


class SlotCopies(NamedTuple):
    """Slot `src[i]` goes to slot `dst[i]`, for all i at once; int64 [n] each, no `dst` occurs twice."""

    src: IntArray
    dst: IntArray


class PendingCopies:
    """Copies that the bookkeeping has counted as done, and that no pass has done yet.

    They hold for the pages as they were when each was added: a copy from the destination of an earlier one is
    a copy from that one's source, and the last copy to a slot wins. A page may change hands before the pass,
    since copies come before all writes.

    Attributes:
        sources: the slot that each destination is copied from. Not to be modified.
    """

    def __init__(self) -> None:
        self.sources: dict[int, int] = {}

    def add(self, src: Iterable[int], dst: Iterable[int]) -> None:
        """Copy slots `src` to slots `dst`, all at once, after all copies added before."""
        sources = [self.sources.get(slot, slot) for slot in src]
        self.sources.update(zip(dst, sources, strict=True))

    def take(self) -> SlotCopies | None:
        """All of them, which are then no longer pending; None without any."""
        if not self.sources:
            return None
        num = len(self.sources)
        src = np.fromiter(self.sources.values(), np.int64, num)
        dst = np.fromiter(self.sources.keys(), np.int64, num)
        self.sources.clear()
        return SlotCopies(src, dst)

    def forget(self) -> None:
        """Drop them, since what the slots held is lost."""
        self.sources.clear()
