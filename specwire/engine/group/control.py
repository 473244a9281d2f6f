"""Connections between the driver and the ranks of a group: the driver broadcasts, rank 0 answers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_TOKEN_BYTES = 32
_HANDSHAKE = struct.Struct(f"<{_TOKEN_BYTES}sq")
_HEADER = struct.Struct("<q")
_HANDSHAKE_S = 5.0
# Ranks authenticate as soon as they are connected. Beyond this many unauthenticated connections the oldest is
# closed: it is not a rank's.
_MAX_UNAUTHENTICATED = 256
_PAUSE_S = 0.01

# Documented by torch, but not in its type declarations.
_dist: Any = dist


def open_store(host: str) -> Any:
    """A key-value store in this process for the rendezvous of the ranks; it has attributes `host` and `port`.
    It has no authentication, so it listens on this address only; by default it would listen on all."""
    listening = _listen(host)
    port = listening.getsockname()[1]
    return _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def connect_store(host: str, port: int, timeout_s: float) -> Any:
    """A client of another process's store."""
    return _dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def substore(store: Any, name: str) -> Any:
    """A view of a store, with its keys under a prefix."""
    return _dist.PrefixStore(name, store)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


class DriverConnections:
    """The driver's side: a connection to each rank. A peer that sends the token is accepted as one.

    gloo could do this, but its threads wake each other up for every message; here a message wakes up only its
    receiver. Every call raises OSError when a rank disconnects or times out.

    Ranks connect long before the driver waits for them, and connections that send nothing must neither delay
    them nor fill the backlog: until all ranks are there, an event loop on a thread of its own hears all.

    Args:
        host: this machine's address, as the ranks reach it.

    Attributes:
        port, token: what a rank needs to connect.
    """

    def __init__(self, host: str) -> None:
        self._listening = _listen(host)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._ranks: list[socket.socket] = []
        self._poll = select.poll()
        self._answer_timeout_s = 0.0
        self._called: dict[int, socket.socket] = {}  # those of `_ranks` to be, by rank
        self._changed = threading.Condition()
        self._hears_no_more = False
        self._hearing = threading.Thread(
            target=lambda: asyncio.run(self._hear_all()), name="group-greetings", daemon=True
        )
        self._hearing.start()

    def accept(self, num_ranks: int, timeout_s: float, answer_timeout_s: float) -> None:
        """Wait until all ranks have connected; no more are accepted then.

        Args:
            answer_timeout_s: time limit of later answers.

        Raises:
            TimeoutError: some ranks did not connect in time.
            ConnectionError: `abort` or `close` was called.
        """
        numbers = range(num_ranks)
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._hears_no_more or self._called.keys() >= set(numbers), timeout_s
            )
            if self._hears_no_more or not arrived:
                problem = f"{len(self._called)} of {num_ranks} ranks have called"
                raise ConnectionError(problem) if arrived else TimeoutError(problem)
            self._ranks = [self._called.pop(number) for number in numbers]
        self._end_hearing()
        self._answer_timeout_s = answer_timeout_s
        for connection in self._ranks:
            _configure(connection)
            connection.settimeout(answer_timeout_s)
            self._poll.register(connection, select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send to all ranks, without waiting."""
        for connection in self._ranks:
            _send(connection, message)

    def receive_answer(self) -> bytes:
        """The answer of rank 0; other ranks never send, so if one is readable it has disconnected."""
        ready = {number for number, _ in self._poll.poll(self._answer_timeout_s * 1e3)}
        if not ready:
            raise TimeoutError(f"no answer within {self._answer_timeout_s:g} s")
        if self._ranks[0].fileno() not in ready:
            raise ConnectionError("another rank hung up")
        return _receive_message(self._ranks[0])

    def abort(self) -> None:
        """End all waits, now and later; from any thread."""
        self._end_hearing()
        _shut_down(self._ranks)

    def close(self) -> None:
        """Close the connections; no thread may be waiting."""
        self._end_hearing()
        for connection in self._ranks:
            connection.close()

    def _end_hearing(self) -> None:
        """Accept no more, and close all that are not ranks by now; repeatedly."""
        with self._changed:
            self._hears_no_more = True
            self._changed.notify_all()
        _shut_down([self._listening])  # this ends the thread
        self._hearing.join()
        for connection in self._called.values():
            connection.close()

    async def _hear_all(self) -> None:
        loop, greetings = asyncio.get_running_loop(), dict[asyncio.Task[None], None]()  # oldest first
        with self._listening:
            while not self._hears_no_more:
                try:
                    connection, _ = await loop.sock_accept(self._listening)
                except OSError:  # it was shut down, the peer is gone, or there is no free descriptor
                    await asyncio.sleep(_PAUSE_S)
                    continue
                connection.setblocking(False)
                if len(greetings) >= _MAX_UNAUTHENTICATED:
                    oldest = next(iter(greetings))
                    del greetings[oldest]
                    oldest.cancel()
                greeting = loop.create_task(self._hear(connection))
                greetings[greeting] = None
                greeting.add_done_callback(lambda done: greetings.pop(done, None))
                await asyncio.sleep(0)  # it begins; accepting a backlog would leave the others no turn

    async def _hear(self, connection: socket.socket) -> None:
        """Keep the connection if it sends the token in time, else close it."""
        loop, data = asyncio.get_running_loop(), b""
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_HANDSHAKE_S):
                    while missing := _HANDSHAKE.size - len(data):
                        more = await loop.sock_recv(connection, missing)
                        if not more:
                            return
                        data += more
                token, rank = _HANDSHAKE.unpack(data)
                if hmac.compare_digest(token, self.token):
                    stack.pop_all()
                    with self._changed:
                        self._called[rank] = connection
                        self._changed.notify_all()


class RankConnection:
    """A rank's side; connecting to the driver has a time limit."""

    def __init__(self, host: str, port: int, token: bytes, rank: int, timeout_s: float) -> None:
        self._connection = socket.create_connection((host, port), timeout_s)
        self._connection.settimeout(None)
        _configure(self._connection)
        self._connection.sendall(_HANDSHAKE.pack(token, rank))

    def receive(self) -> bytes:
        """The next message of the driver; waits without limit, since a driver may be idle."""
        return _receive_message(self._connection)

    def answer(self, message: bytes) -> None:
        """Send an answer to the driver; rank 0 only."""
        _send(self._connection, message)

    def close(self) -> None:
        """Disconnect."""
        _shut_down([self._connection])


def _configure(connection: socket.socket) -> None:
    """Send messages without delay, and detect a vanished machine eventually."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_HEADER.pack(len(message)) + message)


def _receive_message(connection: socket.socket) -> bytes:
    (num_bytes,) = _HEADER.unpack(_receive(connection, _HEADER.size))
    return _receive(connection, num_bytes)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_read = connection.recv_into(rest)
        if not num_read:
            raise ConnectionError("the other side hung up")
        rest = rest[num_read:]
    return bytes(data)


def _shut_down(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # already disconnected
            connection.shutdown(socket.SHUT_RDWR)
