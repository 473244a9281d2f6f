"""An emulated network between two services: a TCP proxy with latency, jitter and a bandwidth limit.

    client ──▶ [ (bytes, due), (bytes, due), ... ] ──▶ service
    client ◀── [ ..., (due, bytes), (due, bytes) ] ◀── service

Opening, half-closing and resetting a connection are delayed like its bytes. Unlike a real network, it loses
no packets, has no congestion window (but 4 MiB in flight for each connection and direction), and accepts a
client's connection without a round trip (the service sees it one delay later).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import math
import random
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from specwire.config.fields import split_address
from specwire.config.link import Link, ProxyConfig
from specwire.errors import ConfigError
from tools.proxy.alarm import Alarm

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 4 << 20
_MIN_PIECE_BYTES = 1500
_MAX_PIECE_S = 1e-3


class Signal(enum.Enum):
    """An event of a connection, which is delayed like its bytes."""

    OPEN = enum.auto()
    END = enum.auto()
    RESET = enum.auto()


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

    def __init__(self, lane: LinkDirection, alarm: Alarm, source: _End, sink: _End, seed: str) -> None:
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
            num_bytes = 0 if isinstance(piece, Signal) else len(piece)
            self._pieces.append((self._lane.send(num_bytes) + delay_s, piece))
            self.num_held_bytes += num_bytes
        if self.num_held_bytes >= MAX_HELD_BYTES:
            self._source.pause_reading()
        if was_empty or what is Signal.RESET:
            self.deliver()

    def deliver(self) -> None:
        """Deliver what is due, as far as the sink accepts it, and set the alarm for the rest."""
        while self._pieces and not self._lane.is_stalled:
            # A reset is delivered even to a sink that does not read.
            if not (self._sink.takes_more or self._pieces[-1][1] is Signal.RESET):
                break
            due_s, piece = self._pieces[0]
            if due_s > time.monotonic():
                if due_s != self._alarm_s:
                    self._alarm_s = due_s
                    self._alarm.set(due_s, self.deliver)
                break
            self._pieces.popleft()
            self.num_held_bytes -= 0 if isinstance(piece, Signal) else len(piece)
            self._sink.take(piece)
        if self.num_held_bytes <= MAX_HELD_BYTES // 2:
            self._source.resume_reading()

    def close(self) -> None:
        """The sink is closed or unreachable: bytes in flight are lost, and so are later ones."""
        self.is_closed = True
        self._pieces.clear()
        self.num_held_bytes = 0


def _pieces(what: bytes | Signal, bytes_per_s: float) -> Iterator[bytes | Signal]:
    """Pieces that occupy the link for a millisecond, so that the first byte does not wait for the last."""
    if isinstance(what, Signal) or math.isinf(bytes_per_s):
        yield what
        return
    step = max(_MIN_PIECE_BYTES, int(bytes_per_s * _MAX_PIECE_S))
    for start in range(0, len(what), step):
        yield what[start : start + step]


class DelayProxy:
    """A proxy to one service, on a port of its own while it is entered.

        proxy = DelayProxy("127.0.0.1:7071", Link(rtt_ms=20))
        async with proxy as address:
            ...  # connect to `address`

    Its methods are for the thread of the event loop that it was entered on.

    Raises:
        ConfigError: an address is not HOST:PORT, or, when entered, cannot be bound.
    """

    def __init__(self, to: str, link: Link, *, listen: str = "127.0.0.1:0") -> None:
        self.to = split_address("to", to)
        split_address("listen", listen)
        self._listen = listen
        self._link = link
        self._lanes = LinkDirection(link), LinkDirection(link)
        self._numbers = itertools.count()
        self._connections: set[_Connection] = set()

    async def __aenter__(self) -> str:
        """Listen; returns the HOST:PORT to connect to."""
        host, port = split_address("listen", self._listen)
        self._alarm = Alarm()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host.strip("[]"), port)
        except OSError:
            self._alarm.close()
            problem = "cannot be bound (in use, or not of this machine)"
            raise ConfigError(f"--listen {self._listen}: {problem}") from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        """Stop listening; reset what is connected."""
        self._server.close()
        self.cut()
        await asyncio.sleep(0)  # sockets that were cut are closed in the next iteration
        await self._server.wait_closed()
        self._alarm.close()

    def cut(self) -> None:
        """Reset all connections now; bytes in flight are lost. New connections are accepted."""
        for connection in list(self._connections):
            connection.cut()

    def _accept(self) -> asyncio.Protocol:
        seed = f"{self._link.seed}/{next(self._numbers)}"
        connection = _Connection(self.to, self._lanes, self._alarm, seed, self._connections.discard)
        self._connections.add(connection)
        return connection.client


class _Connection:
    """A client's connection, and its connection to the service."""

    def __init__(
        self,
        to: tuple[str, int],
        lanes: tuple[LinkDirection, LinkDirection],
        alarm: Alarm,
        seed: str,
        on_end: Callable[[_Connection], None],
    ) -> None:
        self._to, self._on_end = to, on_end
        self._opening: asyncio.Task[None] | None = None
        self.client, self.service = _End(self), _End(self)
        there = DelayLine(lanes[0], alarm, self.client, self.service, f"{seed}/there")
        back = DelayLine(lanes[1], alarm, self.service, self.client, f"{seed}/back")
        self.lines = there, back
        self.client.outgoing = self.service.incoming = there
        self.service.outgoing = self.client.incoming = back

    def open(self) -> None:
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        host, port = self._to
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.service, host.strip("[]"), port)
        except OSError as error:
            log.warning("no connection to %s:%d: %s", host, port, error)
            self.service.connection_lost(error)

    def cut(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self.client.reset()
        self.service.reset()

    def end_is_gone(self) -> None:
        if self.client.is_gone and self.service.is_gone:
            self._on_end(self)


class _End(asyncio.Protocol):
    """One of the two sockets of a connection. (asyncio itself sets TCP_NODELAY.)

    Attributes:
        outgoing, incoming: lines that carry what it sends and what it receives.
    """

    outgoing: DelayLine
    incoming: DelayLine

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._transport: asyncio.Transport | None = None
        self._has_read_all = self._has_written_all = False
        self.takes_more = True
        self.is_gone = False

    # Events of the socket:

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self.is_gone:  # cut before it was connected
            transport.abort()
            return
        self._transport = transport
        if self is self._connection.client:
            self.outgoing.put(Signal.OPEN)
        else:
            self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self.outgoing.put(data)

    def eof_received(self) -> bool:
        self._has_read_all = True
        self.outgoing.put(Signal.END)
        self._close_if_over()
        return True  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        self.incoming.close()
        if exc is not None or not self._has_read_all:
            self.outgoing.put(Signal.RESET)
        self._connection.end_is_gone()

    def pause_writing(self) -> None:
        self.takes_more = False

    def resume_writing(self) -> None:
        self.takes_more = True
        self.incoming.deliver()

    # Called by the lines:

    def take(self, piece: bytes | Signal) -> None:
        """Repeat what happened at the other end."""
        if piece is Signal.OPEN:
            self.takes_more = False  # until it is connected
            self._connection.open()
        elif piece is Signal.RESET:
            self.reset()
        elif self._transport is None or self._transport.is_closing():
            pass  # lost; `connection_lost` follows
        elif isinstance(piece, Signal):
            self._has_written_all = True
            with contextlib.suppress(OSError):  # reset meanwhile
                self._transport.write_eof()
            self._close_if_over()
        else:
            self._transport.write(piece)

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def reset(self) -> None:
        """Reset the connection; unsent bytes are lost."""
        if self._transport is not None:
            with contextlib.suppress(OSError):  # closed already
                linger = struct.pack("ii", 1, 0)  # RST rather than FIN
                raw = self._transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        elif not self.is_gone:
            self.connection_lost(None)

    def _close_if_over(self) -> None:
        has_all = self._has_written_all or self.incoming.is_closed
        if self._transport is not None and self._has_read_all and has_all:
            self._transport.close()


@contextlib.asynccontextmanager
async def serving(config: ProxyConfig) -> AsyncIterator[str]:
    """`specwire proxy`: yields its address and what it does.

    Raises:
        ConfigError: the address cannot be bound.
    """
    async with DelayProxy(config.to, config, listen=config.listen) as address:
        limit = f"{config.bandwidth_mbps:g} Mbit/s" if config.bandwidth_mbps else "any bandwidth"
        added = f"{config.rtt_ms:g} ms round trip, ±{config.jitter_ms:g} ms and {limit} each way"
        yield f"{address} to {config.to}: {added}"
