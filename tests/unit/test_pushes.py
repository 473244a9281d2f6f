"""How much may be under way that was not asked for: it follows the link, without knowing it."""

from __future__ import annotations

from collections import deque

import pytest

from specwire.errors import InvalidRequestError
from specwire.proposals.pushes import (
    INITIAL_BYTES,
    MAX_BYTES,
    MAX_DELAY_NS,
    MIN_BYTES,
    REPORT_BYTES,
    Arrived,
    PushWindow,
)

MS = 1_000_000


class SimulatedLink:
    """Both ends, and a queue between them that takes everything at once, as buffers do."""

    def __init__(self, *, bytes_per_ms: int, rtt_ms: int) -> None:
        self.window, self.arrived = PushWindow(), Arrived()
        self.bytes_per_ms, self.rtt_ms = bytes_per_ms, rtt_ms
        self.under_way = deque[tuple[int, int]]()  # when it arrives, in ms, and its bytes
        self.free_ms = self.num_bytes = 0
        self.reports = deque[tuple[int, int]]()
        self.longest_queue_ms = 0

    def run(self, first_ms: int, last_ms: int, message_bytes: int) -> None:
        """A sender that always has more."""
        for now_ms in range(first_ms, last_ms):
            while self.reports and self.reports[0][0] <= now_ms:
                self.window.arrived(self.reports.popleft()[1], now_ms * MS)
            while self.window.room > 0:
                self.window.sent(message_bytes, now_ms * MS)
                self.free_ms = max(self.free_ms, now_ms) + message_bytes // self.bytes_per_ms
                self.under_way.append((self.free_ms + self.rtt_ms // 2, message_bytes))
            self.longest_queue_ms = max(self.longest_queue_ms, self.free_ms - now_ms)
            while self.under_way and self.under_way[0][0] <= now_ms:
                self.arrived.add(self.under_way.popleft()[1])
                self.num_bytes += message_bytes
                if self.arrived.is_due:
                    self.reports.append((now_ms + self.rtt_ms // 2, self.arrived.report()))


def test_a_slow_link_has_little_under_way() -> None:
    """2 Mbit/s: an answer waits for a few messages of 2 KiB, not for seconds."""
    link = SimulatedLink(bytes_per_ms=250, rtt_ms=10)
    link.run(0, 2_000, 2_048)
    link.longest_queue_ms = 0
    link.run(2_000, 10_000, 2_048)
    assert link.longest_queue_ms < 2 * (MIN_BYTES + 2_048) // 250
    assert link.window.num_bytes <= 2 * MIN_BYTES


@pytest.mark.parametrize("rtt_ms", [2, 40])
def test_a_fast_link_is_used(rtt_ms: int) -> None:
    """1 Gbit/s, near and far: the window comes to hold what arrives in a round trip."""
    link = SimulatedLink(bytes_per_ms=125_000, rtt_ms=rtt_ms)
    link.run(0, 2_000, 8_192)
    assert link.window.num_bytes == MAX_BYTES
    before = link.num_bytes
    link.run(2_000, 3_000, 8_192)
    assert link.num_bytes - before >= min(125_000, MAX_BYTES // rtt_ms) * 1_000 * 0.5


def test_reports_that_waited_for_a_message_teach_nothing() -> None:
    """What arrives in small parts is reported with the next request, a pass later."""
    window = PushWindow()
    for turn in range(1, 20):
        window.sent(REPORT_BYTES - 1, turn * 100 * MS)
        window.arrived(turn * (REPORT_BYTES - 1), turn * 100 * MS + 5 * MAX_DELAY_NS)
    assert window.num_bytes == window.room == INITIAL_BYTES


def test_a_peer_reports_no_more_than_it_was_sent() -> None:
    window = PushWindow()
    window.sent(100, 1)
    window.arrived(60, 2)
    for num_bytes in (101, 59, -1):
        with pytest.raises(InvalidRequestError, match=rf"num_arrived_bytes={num_bytes}: .*\[60, 100\]"):
            window.arrived(num_bytes, 3)


def test_a_full_window_is_always_reported() -> None:
    """Or both ends would wait for each other."""
    assert REPORT_BYTES <= MIN_BYTES
    arrived = Arrived()
    arrived.add(MIN_BYTES)
    assert arrived.is_due
    assert (arrived.report(), arrived.is_due) == (MIN_BYTES, False)
