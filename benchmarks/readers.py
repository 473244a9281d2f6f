"""Generations whose clients cost next to nothing: HTTP/2 by hand, frames counted and dropped.

On two cores, clients in Python would take what a second worker is to bring.
`python -m benchmarks.readers ADDRESS WORKERS CONNECTIONS STREAMS` begins as many streams on so many
connections, as many at each worker, writes a line when all have had a message, and reads until it is ended.
"""

from __future__ import annotations

import itertools
import re
import selectors
import socket
import struct
import sys
from collections import Counter
from collections.abc import Sequence

from specwire import Rule, SamplingParams
from specwire.wire import client as wire

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_MOST = 2**31 - 1
_DEFAULT_WINDOW = 65_535
_NUM_HEADER_BYTES = 9
_READ_BYTES = 1 << 20
_METHOD = "/specwire.v1.GenerationService/Generate"
_WORKER = re.compile(rb"x-specwire-worker.(\d+)/")
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
NO_END = 1 << 29
"""Tokens of a stream: more than it makes before it is cancelled."""


class Connection:
    """One connection, and the generations that it carries.

    Attributes:
        worker: the number of the one that serves it; 1 where the coordinator has no workers.
        num_begun: streams that have had a message.
    """

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.worker = 1
        self._authority = address
        self._next_id = 1
        self._begun: set[int] = set()
        self._received = b""
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _MOST)
        window = struct.pack(">I", _MOST - _DEFAULT_WINDOW)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, settings) + _frame(_WINDOW_UPDATE, window))

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def generate(self, max_tokens: int = NO_END) -> None:
        """Begin a greedy generation."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        params = SamplingParams(temperature=0.0, rule=Rule.GUMBEL, max_tokens=max_tokens, ignore_eos=True)
        message = wire.generate_request(None, params, PROMPT).SerializeToString()
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": _METHOD,
            ":authority": self._authority,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        headers = b"".join(itertools.starmap(_literal, fields.items()))
        self.socket.sendall(
            _frame(_HEADERS, headers, _END_HEADERS, stream_id)
            + _frame(_DATA, struct.pack(">BI", 0, len(message)) + message, _END_STREAM, stream_id)
        )

    def read(self) -> None:
        """Count and drop what has arrived.

        Raises:
            RuntimeError: a stream or the connection has ended.
        """
        data = self._received + self.socket.recv(_READ_BYTES)
        start = 0
        while (payload := start + _NUM_HEADER_BYTES) <= len(data):
            length = int.from_bytes(data[start : start + 3])
            if payload + length > len(data):
                break
            kind, flags = data[start + 3], data[start + 4]
            if kind == _DATA:
                self._begun.add(int.from_bytes(data[start + 5 : payload]))
            else:
                self._take(kind, flags, data[payload : payload + length])
            start = payload + length
        self._received = data[start:]

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            raise RuntimeError(f"a generation has ended: {payload!r}")
        if kind == _HEADERS and (found := _WORKER.search(payload)):
            self.worker = int(found[1])
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self.socket.sendall(_frame(kind, payload if kind == _PING else b"", _ACK))


def _frame(kind: int, payload: bytes, flags: int = 0, stream_id: int = 0) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream_id) + payload


def _literal(name: str, value: str) -> bytes:
    """A header field that no table keeps (RFC 7541, 6.2.2)."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def connected(address: str, num_workers: int, num_connections: int) -> Sequence[Connection]:
    """So many connections, as many to each worker; the kernel chooses the worker of each."""
    found: list[Connection] = []
    num_each = Counter[int]()
    while len(found) < num_connections:
        connection = Connection(address)
        connection.generate()
        while not connection.num_begun:
            connection.read()
        if num_each[connection.worker] * num_workers < num_connections:
            num_each[connection.worker] += 1
            found.append(connection)
        else:
            connection.socket.close()
    return found


def read_all(connections: Sequence[Connection], num_streams: int) -> None:
    """Begin all streams, write a line when they run, and read without end."""
    for i in range(num_streams - len(connections)):
        connections[i % len(connections)].generate()
    num_waiting = num_streams
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        while True:
            for key, _ in selector.select():
                key.data.read()
            if num_waiting:
                num_waiting = num_streams - sum(connection.num_begun for connection in connections)
                if not num_waiting:
                    print(flush=True)


if __name__ == "__main__":
    address, num_workers, num_connections, num_streams = sys.argv[1:]
    read_all(connected(address, int(num_workers), int(num_connections)), int(num_streams))
