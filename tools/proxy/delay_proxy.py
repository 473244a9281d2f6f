"""An emulated network between two services: a TCP proxy with latency, jitter and a bandwidth limit.

    client ──▶ [ (bytes, due), (bytes, due), ... ] ──▶ service
    client ◀── [ ..., (due, bytes), (due, bytes) ] ◀── service        (`delay_line`)

Opening, half-closing and resetting a connection are delayed like its bytes. Unlike a real network, it loses
no packets, has no congestion window (but 4 MiB in flight for each connection and direction), and accepts a
client's connection without a round trip (the service sees it one delay later).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable

from specwire.config.fields import split_address
from specwire.config.link import Link, ProxyConfig
from specwire.errors import ConfigError
from tools.proxy.alarm import Alarm
from tools.proxy.delay_line import DelayLine, LinkDirection, Signal

log = logging.getLogger(__name__)


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
        connection = _Connection(self.to, self._connections.discard)
        seed = f"{self._link.seed}/{next(self._numbers)}"
        connection.set_lines(self._lanes, self._alarm, seed)
        self._connections.add(connection)
        return connection.client


class _Connection:
    """A client's connection, and its connection to the service."""

    def __init__(self, to: tuple[str, int], forget: Callable[[_Connection], None]) -> None:
        self._to, self._forget = to, forget
        self._opening: asyncio.Task[None] | None = None
        self.client, self.service = _End(self), _End(self)

    def set_lines(self, lanes: tuple[LinkDirection, LinkDirection], alarm: Alarm, seed: str) -> None:
        """Create the lines of both directions."""
        self.there = DelayLine(lanes[0], alarm, self.client, self.service, f"{seed}/there")
        self.back = DelayLine(lanes[1], alarm, self.service, self.client, f"{seed}/back")
        self.lines = self.there, self.back

    def out_of(self, end: _End) -> DelayLine:
        """The line that carries what this end sends."""
        return self.there if end is self.client else self.back

    def into(self, end: _End) -> DelayLine:
        """The line that carries what this end receives."""
        return self.back if end is self.client else self.there

    def open(self) -> None:
        """Connect to the service."""
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        host, port = self._to
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.service, host.strip("[]"), port)
        except OSError as error:
            log.warning("no connection to %s:%d: %s", host, port, error)
            self.service.connection_lost(error)

    def cut(self) -> None:
        """Reset both ends now."""
        if self._opening is not None:
            self._opening.cancel()
        self.client.reset()
        self.service.reset()

    def end_is_gone(self) -> None:
        """Called by an end."""
        if self.client.is_gone and self.service.is_gone:
            self._forget(self)


class _End(asyncio.Protocol):
    """One of the two sockets of a connection. (asyncio itself sets TCP_NODELAY.)"""

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
            self._connection.there.put(Signal.OPEN)
        else:
            self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._connection.out_of(self).put(data)

    def eof_received(self) -> bool:
        self._has_read_all = True
        self._connection.out_of(self).put(Signal.END)
        self._close_if_over()
        return True  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        self._connection.into(self).close()
        if exc is not None or not self._has_read_all:
            self._connection.out_of(self).put(Signal.RESET)
        self._connection.end_is_gone()

    def pause_writing(self) -> None:
        self.takes_more = False

    def resume_writing(self) -> None:
        self.takes_more = True
        self._connection.into(self).deliver()

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
        has_all = self._has_written_all or self._connection.into(self).is_closed
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
