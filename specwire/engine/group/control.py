"""The driver and all ranks of a group in lock step: the driver speaks, all hear it, rank 0 answers."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

_TOKEN_BYTES = 32
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sq")
_HEADER = struct.Struct("<q")
_GREETING_S = 5.0
# A rank greets as soon as it is connected: of more connections that have not, the oldest is a stranger's.
_MAX_STRANGERS = 256
_PAUSE_S = 0.01

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
        listening = _listen(host)
        self.port: int = listening.getsockname()[1]
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._greetings = _Greetings(listening, self.token)
        self._ranks: list[socket.socket] = []
        self._poll = select.poll()
        self._answer_timeout_s = 0.0

    def accept(self, num_ranks: int, timeout_s: float, answer_timeout_s: float) -> None:
        """Wait until all ranks have greeted.

        Args:
            answer_timeout_s: longest wait for an answer, from then on.
        """
        self._ranks = self._greetings.wait(num_ranks, timeout_s)
        self._answer_timeout_s = answer_timeout_s
        for line in self._ranks:
            _set_up(line)
            line.settimeout(answer_timeout_s)
            self._poll.register(line, select.POLLIN)

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
        self._greetings.end()
        _hang_up(self._ranks)

    def close(self) -> None:
        """Give the connections back; nobody may wait."""
        self._greetings.end()
        for line in self._ranks:
            line.close()


class _Greetings:
    """Accepts connections, and keeps those that greet with the token; others are hung up on.

    All are heard at the same time, on a thread of its own: ranks call long before they are waited for, when
    strangers, who may be silent, must neither delay them nor fill the backlog.
    """

    def __init__(self, listening: socket.socket, token: bytes) -> None:
        listening.setblocking(False)
        self._listening, self._token = listening, token
        self._heard: dict[socket.socket, tuple[float, bytearray]] = {}  # oldest first, with its deadline
        self._ranks: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="group-greetings", daemon=True)
        self._thread.start()

    def wait(self, num_ranks: int, timeout_s: float) -> list[socket.socket]:
        """The ranks' connections, in order, once all are there; no more are accepted then.

        Raises:
            TimeoutError: they are not, after this time.
            ConnectionError: it was ended.
        """
        numbers = range(num_ranks)
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._has_ended or self._ranks.keys() >= set(numbers), timeout_s
            )
            if self._has_ended or not arrived:
                problem = f"{len(self._ranks)} of {num_ranks} ranks have called"
                raise ConnectionError(problem) if arrived else TimeoutError(problem)
            found = [self._ranks.pop(number) for number in numbers]
        self.end()
        return found

    def end(self) -> None:
        """Accept no more, and hang up on all that are not waited for; from any thread, as often as wanted."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        _hang_up([self._listening])  # which ends the thread
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listening:
            selector.register(self._listening, selectors.EVENT_READ)
            while not self._has_ended:
                for key, _ in selector.select(self._rest_s()):
                    if key.fileobj is self._listening:
                        self._accept(selector)
                    else:
                        self._hear(selector, cast(socket.socket, key.fileobj))
                while self._rest_s() == 0:
                    self._drop(selector, next(iter(self._heard)))
        for line in (*self._heard, *self._ranks.values()):
            line.close()

    def _rest_s(self) -> float | None:
        """Until the oldest must have greeted."""
        first_s = next((deadline_s for deadline_s, _ in self._heard.values()), None)
        return None if first_s is None else max(0.0, first_s - time.monotonic())

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            line, _ = self._listening.accept()
        except OSError:  # it is gone, or there is no descriptor for it
            time.sleep(_PAUSE_S)
            return
        line.setblocking(False)
        if len(self._heard) >= _MAX_STRANGERS:
            self._drop(selector, next(iter(self._heard)))
        self._heard[line] = time.monotonic() + _GREETING_S, bytearray()
        selector.register(line, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, line: socket.socket) -> None:
        _, data = self._heard[line]
        try:
            more = line.recv(_GREETING.size - len(data))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        data += more
        if more and len(data) < _GREETING.size:
            return
        token, rank = _GREETING.unpack(data) if more else (b"", 0)
        if not hmac.compare_digest(token, self._token):
            self._drop(selector, line)
            return
        selector.unregister(line)
        del self._heard[line]
        with self._changed:
            self._ranks[rank] = line
            self._changed.notify_all()

    def _drop(self, selector: selectors.BaseSelector, line: socket.socket) -> None:
        selector.unregister(line)
        del self._heard[line]
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
