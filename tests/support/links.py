"""Two ends of a TCP connection with a delay proxy between them."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
import time
from collections.abc import Callable

from specwire.config.fields import split_address
from specwire.config.link import Link
from tests.support.faulty_proxy import FaultyProxy

MS = 1e-3


@dataclasses.dataclass
class Peer:
    """One side of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(cls, address: str) -> Peer:
        return cls(*await asyncio.open_connection(*split_address("address", address)))

    async def sends_to(self, other: Peer, data: bytes) -> float:
        """Seconds until the other side has read it all."""
        started = time.monotonic()
        self.writer.write(data)
        assert await other.reader.readexactly(len(data)) == data
        return time.monotonic() - started

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Linked:
    """A service behind a proxy; each connection gives both of its sides."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._accepted: asyncio.Queue[Peer] = asyncio.Queue()
        self._peers: list[Peer] = []

    async def __aenter__(self) -> Linked:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.proxy = FaultyProxy(f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}", self.link)
        self.address = await self.proxy.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.proxy.__aexit__(None, None, None)
        self._server.close()
        for peer in self._peers:
            peer.writer.transport.abort()
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted.put_nowait(Peer(reader, writer))

    async def connect(self) -> tuple[Peer, Peer]:
        """The client's side, the service's side."""
        client = await Peer.connect(self.address)
        served = await self._accepted.get()
        self._peers += [client, served]
        return client, served


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)
