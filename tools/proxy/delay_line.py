"""The effect of a link on bytes that pass through it. No sockets: `delay_proxy` connects it to them."""

from __future__ import annotations

import enum
import math
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from specwire.config.link import Link
from tools.proxy.alarm import Alarm

MAX_HELD_BYTES = 4 << 20
_MIN_PIECE_BYTES = 1500
_MAX_PIECE_S = 1e-3


class Signal(enum.Enum):
    """An event of a connection, which is delayed like its bytes."""

    OPEN = enum.auto()
    END = enum.auto()
    RESET = enum.auto()


class Source(Protocol):
    """The end that bytes of a line come from."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Sink(Protocol):
    """The end that they go to; it calls `DelayLine.deliver` when it accepts more again."""

    @property
    def takes_more(self) -> bool: ...

    def take(self, piece: bytes | Signal) -> None: ...


class LinkDirection:
    """One direction of the link, shared by all connections: it sends one piece after the other."""

    def __init__(self, link: Link) -> None:
        self.is_stalled = False
        self.change(link)

    def change(self, link: Link) -> None:
        """Use these settings for bytes that arrive from now on."""
        self.link = link
        self._free_at_s = -math.inf

    def send(self, num_bytes: int) -> float:
        """When the last of these bytes is sent, in seconds of the monotonic clock."""
        self._free_at_s = max(self._free_at_s, time.monotonic()) + num_bytes / self.link.bytes_per_s
        return self._free_at_s


class DelayLine:
    """One direction of one connection: pieces, each of which waits until it is due.

    Many are in flight at a time, so the delay does not limit the throughput; without a bandwidth limit,
    `MAX_HELD_BYTES` per one-way delay does. They are never reordered: one that is due before its predecessor,
    by jitter or a change of the link, waits for it.
    """

    def __init__(self, lane: LinkDirection, alarm: Alarm, source: Source, sink: Sink, seed: str) -> None:
        self._lane, self._alarm = lane, alarm
        self._source, self._sink = source, sink
        self._random = random.Random(seed)
        self._pieces: deque[tuple[float, bytes | Signal]] = deque()
        self.num_held_bytes = 0
        self._alarm_s = -math.inf
        self._has_ended = False
        self.is_closed = False

    def put(self, what: bytes | Signal) -> None:
        """Send bytes or a signal; after END only RESET is accepted."""
        if self.is_closed or (self._has_ended and what is not Signal.RESET):
            return
        self._has_ended = what is Signal.END
        link = self._lane.link
        delay_s = (link.rtt_ms / 2 + self._random.uniform(-link.jitter_ms, link.jitter_ms)) / 1e3
        was_empty = not self._pieces
        for piece in _pieces(what, link.bytes_per_s):
            num_bytes = _num_bytes(piece)
            self._pieces.append((self._lane.send(num_bytes) + delay_s, piece))
            self.num_held_bytes += num_bytes
        if self.num_held_bytes >= MAX_HELD_BYTES:
            self._source.pause_reading()
        if was_empty or what is Signal.RESET:
            self.deliver()

    def deliver(self) -> None:
        """Deliver what is due, as far as the sink accepts it, and set the alarm for the rest."""
        while self._pieces and self._may_deliver:
            due_s, piece = self._pieces[0]
            if due_s > time.monotonic():
                self._wake_at(due_s)
                break
            self._pieces.popleft()
            self.num_held_bytes -= _num_bytes(piece)
            self._sink.take(piece)
        if self.num_held_bytes <= MAX_HELD_BYTES // 2:
            self._source.resume_reading()

    def close(self) -> None:
        """The sink is closed or unreachable: bytes in flight are lost, and so are later ones."""
        self.is_closed = True
        self._pieces.clear()
        self.num_held_bytes = 0

    @property
    def _may_deliver(self) -> bool:
        is_reset = self._pieces[-1][1] is Signal.RESET  # delivered even to a sink that does not read
        return not self._lane.is_stalled and (self._sink.takes_more or is_reset)

    def _wake_at(self, when_s: float) -> None:
        if when_s != self._alarm_s:
            self._alarm_s = when_s
            self._alarm.set(when_s, self.deliver)


def _pieces(what: bytes | Signal, bytes_per_s: float) -> Iterator[bytes | Signal]:
    """Pieces that occupy the link for a millisecond, so that the first byte does not wait for the last."""
    if isinstance(what, Signal) or math.isinf(bytes_per_s):
        yield what
        return
    step = max(_MIN_PIECE_BYTES, int(bytes_per_s * _MAX_PIECE_S))
    for start in range(0, len(what), step):
        yield what[start : start + step]


def _num_bytes(piece: bytes | Signal) -> int:
    return 0 if isinstance(piece, Signal) else len(piece)
