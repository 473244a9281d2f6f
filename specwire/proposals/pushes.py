"""Bytes under way that were not asked for: a sender's window, and the receiver's reports. Pure.

    sender ── pushes ──▶ buffers of gRPC, of both kernels, of the network ──▶ receiver
    sender ◀──────────── how many bytes of them have arrived ──────────────── receiver

Answers and requests share the stream with what is pushed, and wait behind it. How long a write takes says
nothing: the buffers take seconds of a slow link at once. So the receiver reports, with its next message, or
with one of its own once enough has arrived; and the sender keeps no more under way than delays an answer by
about `MAX_DELAY_NS`.
"""

from __future__ import annotations

from collections import deque

from specwire.errors import InvalidRequestError

MAX_DELAY_NS = 10_000_000
"""Longest that an answer should wait behind what is pushed: about a pass of a large target."""
MIN_BYTES = 16 << 10
"""Least window: some hundred proposals without supports, however slow the event loops are."""
REPORT_BYTES = 8 << 10
"""What arrives before a report is sent by itself; a full window is always reported."""
MAX_BYTES = 1 << 20
INITIAL_BYTES = 32 << 10


class PushWindow:
    """The bytes that may be under way.

    A report tells the delay of the bytes that caused it: the least delay is that of the network. The message
    that fills the window has all of it ahead in buffers: the window is halved where that took too long, and
    doubled where it did not.

    Attributes:
        num_bytes: the window.
    """

    def __init__(self) -> None:
        self.num_bytes = INITIAL_BYTES
        self._num_sent = self._num_arrived = 0
        self._under_way = deque[tuple[int, int]]()  # bytes sent so far, and when
        self._filled = (0, 0)  # by the first message that did; likewise
        self._least_ns = 0

    @property
    def room(self) -> int:
        """Bytes that may be sent now; a message may be larger, if there is any room."""
        return self.num_bytes - (self._num_sent - self._num_arrived)

    def sent(self, num_bytes: int, now_ns: int) -> None:
        """A message of this size leaves."""
        self._num_sent += num_bytes
        self._under_way.append((self._num_sent, now_ns))
        if self.room <= 0 and not self._filled[0]:
            self._filled = self._num_sent, now_ns

    def arrived(self, num_bytes: int, now_ns: int) -> None:
        """The receiver reports that so many bytes have arrived, of all that were sent.

        Raises:
            InvalidRequestError: more than were sent, or fewer than before.
        """
        if not self._num_arrived <= num_bytes <= self._num_sent:
            problem = f"must lie in [{self._num_arrived}, {self._num_sent}]"
            raise InvalidRequestError("num_arrived_bytes", num_bytes, problem)
        is_prompt = num_bytes - self._num_arrived >= REPORT_BYTES  # else it may have waited for a message
        self._num_arrived = num_bytes
        while self._under_way and self._under_way[0][0] <= num_bytes:
            delay_ns = now_ns - self._under_way.popleft()[1]
            self._least_ns = min(self._least_ns or delay_ns, delay_ns)
        filled_bytes, filled_ns = self._filled
        if filled_bytes and filled_bytes <= num_bytes:
            self._filled = 0, 0
            if is_prompt and now_ns - filled_ns > self._least_ns + MAX_DELAY_NS:
                self.num_bytes = max(MIN_BYTES, self.num_bytes // 2)
            elif is_prompt:
                self.num_bytes = min(MAX_BYTES, 2 * self.num_bytes)


class Arrived:
    """The receiver's end: bytes that were pushed and have arrived.

    Attributes:
        num_bytes: so far.
    """

    def __init__(self) -> None:
        self.num_bytes = self._num_reported = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    @property
    def is_due(self) -> bool:
        """Whether a report is sent although nothing else is."""
        return self.num_bytes - self._num_reported >= REPORT_BYTES

    def report(self) -> int:
        """What the next message says."""
        self._num_reported = self.num_bytes
        return self.num_bytes
