"""How much may be sent ahead of requests at a time. Pure: no clock, no I/O."""

from __future__ import annotations

MAX_DELAY_NS = 10_000_000
"""Longest that an answer should wait behind prepared proposals: about a pass of a large target."""
MIN_BYTES = 4096
MAX_BYTES = 1 << 20
INITIAL_BYTES = 16 << 10


class PushBudget:
    """The size of a message of prepared proposals, from the rate at which the link took the last one.

    A write ends when there is room for the next one: over a link that is full it takes as long as the link.
    Where the first bytes go to buffers, their rate promises too much: so the size is doubled at most.

    Attributes:
        num_bytes: most bytes of the next message.
    """

    def __init__(self) -> None:
        self.num_bytes = INITIAL_BYTES

    def add(self, num_bytes: int, spent_ns: int) -> None:
        """A message of this size was written; the time of a small one says nothing about the link."""
        if num_bytes < MIN_BYTES // 2:
            return
        in_time = MAX_DELAY_NS * num_bytes // max(1, spent_ns)
        most = min(MAX_BYTES, max(self.num_bytes, 2 * num_bytes))
        self.num_bytes = max(MIN_BYTES, min(most, in_time))
