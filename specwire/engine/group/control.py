"""The driver and all ranks of a group in lock step: the driver speaks, all hear it, rank 0 answers."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_TOKEN_BYTES = 32
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sq")
_HEADER = struct.Struct("<q")
_GREETING_S = 5.0

# What torch does not declare, though it documents it.
_dist: Any = dist


def open_store(host: str) -> Any:
    """A store of this process, in which others meet; it has the attributes `host` and `port`.

    It has no lock, so it listens at this address alone; left to itself it would at all of the machine's.
    """
    listening = _listen(host)
    port = listening.getsockname()[1]
    return _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def reach_store(host: str, port: int, timeout_s: float) -> Any:
    """The store of another process."""
    return _dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def part_of(store: Any, name: str) -> Any:
    """A store within a store."""
    return _dist.PrefixStore(name, store)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


class DriverLines:
    """The driver's side: a connection to each rank. gloo would do, with threads that wake each other up for
    every message; here a message wakes up who waits for it.

    Whoever knows the token may be a rank. Every call raises OSError when a rank hung up, or takes too long.

    Args:
        host: this machine's address, as the ranks reach it.

    Attributes:
        port, token: what a rank must know.
    """

    def __init__(self, host: str) -> None:
        self._listening = _listen(host)
        self.port: int = self._listening.getsockname()[1]
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._ranks: list[socket.socket] = []
        self._poll = select.poll()
        self._answer_timeout_s = 0.0

    def accept(self, num_ranks: int, timeout_s: float, answer_timeout_s: float) -> None:
        """Wait until all ranks are there; strangers are hung up on.

        Args:
            answer_timeout_s: longest wait for an answer, from then on.
        """
        deadline = time.monotonic() + timeout_s
        found: dict[int, socket.socket] = {}
        while len(found) < num_ranks:
            self._listening.settimeout(max(0.001, deadline - time.monotonic()))
            line, _ = self._listening.accept()
            rank = self._rank_of(line)
            if rank is not None:
                found[rank] = line
        self._ranks = [found[rank] for rank in range(num_ranks)]
        self._answer_timeout_s = answer_timeout_s
        for line in self._ranks:
            _set_up(line)
            line.settimeout(answer_timeout_s)
            self._poll.register(line, select.POLLIN)

    def _rank_of(self, line: socket.socket) -> int | None:
        line.settimeout(_GREETING_S)
        try:
            token, rank = _GREETING.unpack(_receive(line, _GREETING.size))
        except OSError:
            token = b""
        if hmac.compare_digest(token, self.token):
            return int(rank)
        line.close()
        return None

    def say(self, message: bytes) -> None:
        """To all ranks; returns as soon as it is on its way."""
        for line in self._ranks:
            _send(line, message)

    def await_answer(self) -> bytes:
        """What rank 0 answers; another rank that says anything has hung up."""
        ready = {number for number, _ in self._poll.poll(self._answer_timeout_s * 1e3)}
        if not ready:
            raise TimeoutError(f"no answer within {self._answer_timeout_s:g} s")
        if self._ranks[0].fileno() not in ready:
            raise ConnectionError("another rank hung up")
        return _receive_message(self._ranks[0])

    def abort(self) -> None:
        """Break every wait, now and later; from any thread."""
        _hang_up([self._listening, *self._ranks])

    def close(self) -> None:
        """Give the connections back; nobody may wait."""
        for line in (self._listening, *self._ranks):
            line.close()


class RankLine:
    """A rank's side.

    Args:
        host, port, token: of the driver.
        timeout_s: longest wait for a connection.
    """

    def __init__(self, host: str, port: int, token: bytes, rank: int, timeout_s: float) -> None:
        self._line = socket.create_connection((host, port), timeout_s)
        self._line.settimeout(None)
        _set_up(self._line)
        self._line.sendall(_GREETING.pack(token, rank))

    def hear(self) -> bytes:
        """What the driver says next; waits for ever, since a driver may be idle."""
        return _receive_message(self._line)

    def answer(self, message: bytes) -> None:
        """Rank 0 to the driver."""
        _send(self._line, message)

    def close(self) -> None:
        """Hang up."""
        _hang_up([self._line])


def _set_up(line: socket.socket) -> None:
    """Messages leave at once, and a machine that vanished is noticed some day."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _send(line: socket.socket, message: bytes) -> None:
    line.sendall(_HEADER.pack(len(message)) + message)


def _receive_message(line: socket.socket) -> bytes:
    (num_bytes,) = _HEADER.unpack(_receive(line, _HEADER.size))
    return _receive(line, num_bytes)


def _receive(line: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_read = line.recv_into(rest)
        if not num_read:
            raise ConnectionError("the other side hung up")
        rest = rest[num_read:]
    return bytes(data)


def _hang_up(lines: Iterable[socket.socket]) -> None:
    for line in lines:
        with contextlib.suppress(OSError):  # it hung up before
            line.shutdown(socket.SHUT_RDWR)
