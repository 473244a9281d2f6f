"""How much may be sent ahead of requests at a time. Pure: no clock, no I/O."""

from __future__ import annotations

MAX_DELAY_NS = 10_000_000
"""Longest that an answer should wait behind prepared proposals: about a pass of a large target."""
MIN_BYTES = 4096
"""Less tells nothing about a link: writing takes as long for a few bytes as for none."""
MAX_BYTES = 1 << 20
INITIAL_BYTES = 64 << 10
"""Until something was measured: what gRPC lets a stream send before the receiver has read."""
_MEMORY = 0.8
"""Decay of a measurement's weight with each later one."""


class PushBudget:
    """The size of a message of prepared proposals, from the rate at which the link takes them.

    A write ends when there is room for the next one: over a link that is full it takes as long as the link.
    """

    def __init__(self) -> None:
        self._num_bytes, self._spent_ns = 0.0, 0.0

    @property
    def num_bytes(self) -> int:
        """Most bytes of the next message."""
        if not self._spent_ns:
            return INITIAL_BYTES
        return int(min(MAX_BYTES, max(MIN_BYTES, MAX_DELAY_NS * self._num_bytes / self._spent_ns)))

    def add(self, num_bytes: int, spent_ns: int) -> None:
        """A message of this size was written."""
        if num_bytes >= MIN_BYTES:
            self._num_bytes = _MEMORY * self._num_bytes + num_bytes
            self._spent_ns = _MEMORY * self._spent_ns + max(1, spent_ns)
