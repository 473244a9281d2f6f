"""Processes with few file descriptors: connections over that are shed, those that are open go on."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from specwire.v1 import verify_pb2, verify_pb2_grpc
from tests.support.processes import wait_until

LIMIT = 200
NUM_STRANGERS = 250
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a client says first, with empty settings."""


class Process:
    """`python -m ...` under limits, started by a shell."""

    def __init__(self, limits: str, log: Path, *words: str) -> None:
        self._log = log
        command = f'{limits}; exec "$@"'
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                ["bash", "-c", command, "-", sys.executable, "-m", *words],
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().split()[1]

    @property
    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def limit(self) -> int:
        text = Path(f"/proc/{self.process.pid}/limits").read_text()
        found = re.search(r"Max open files +(\d+)", text)
        assert found
        return int(found[1])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=10)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with contextlib.ExitStack() as stack:

        def start(limits: str, *words: str) -> Process:
            started = Process(limits, tmp_path / words[0], *words)
            stack.callback(started.process.wait)
            stack.callback(started.process.kill)
            return started

        yield start


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def num_closed(connections: list[socket.socket]) -> int:
    """How many of them the other end has closed."""
    with selectors.DefaultSelector() as selector:
        for each in connections:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        ended = 0
        for key, _ in selector.select(0):
            with contextlib.suppress(BlockingIOError):
                try:
                    assert isinstance(key.fileobj, socket.socket)
                    while data := key.fileobj.recv(65536):
                        assert data
                    ended += 1
                except ConnectionError:
                    ended += 1
        return ended


def test_a_grpc_server_sheds_connections_and_keeps_descriptors(
    start: Callable[..., Process], strangers: list[socket.socket]
) -> None:
    service = start(
        f"ulimit -n {LIMIT}", "verify_service", "--model", "emulated:", "--address", "127.0.0.1:0"
    )
    with grpc.insecure_channel(service.address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        request = verify_pb2.VerifyServiceGetModelInfoRequest()
        stub.GetModelInfo(request, timeout=30)
        for _ in range(NUM_STRANGERS):
            strangers.append(service.connect())
            with contextlib.suppress(ConnectionError):
                strangers[-1].sendall(HTTP2)
        wait_until(lambda: num_closed(strangers) >= NUM_STRANGERS - LIMIT * 3 // 4, 20)
        assert service.num_descriptors < LIMIT - 10, "others are left for files and peers"
        stub.GetModelInfo(request, timeout=30)
        wait_until(lambda: "file descriptors are open" in service.log, 20)
    assert service.log.count("file descriptors are open") == 1, service.log


def test_asyncios_servers_log_no_traceback_for_each_connection(
    start: Callable[..., Process], strangers: list[socket.socket]
) -> None:
    """The HTTP front: 19 MB in ten seconds without this."""
    front = start(
        "ulimit -n 60", "specwire.cli", "http", "--address", "127.0.0.1:0", "--server", "127.0.0.1:1"
    )
    assert is_answered(front.address)
    strangers += [front.connect() for _ in range(100)]
    wait_until(lambda: "are open" in front.log, 20)
    # In the middle of the flood it may be among those closed.
    wait_until(lambda: is_answered(front.address), 20)
    time.sleep(1.2)  # asyncio tries again every second
    assert is_answered(front.address)
    assert "Traceback" not in front.log
    assert 1 <= len(front.log.splitlines()) <= 2, front.log  # too many connections, too few descriptors


def is_answered(address: str) -> bool:
    """A client of now: those without a request have made room for it."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        try:
            connection.request("GET", "/none")
            return connection.getresponse().status == 404
        except ConnectionError:
            return False


def test_the_soft_limit_is_raised(start: Callable[..., Process]) -> None:
    proxy = start("ulimit -S -n 100; ulimit -H -n 300", "specwire.cli", "proxy", "--to", "127.0.0.1:1")
    wait_until(lambda: proxy.limit == 300, 20)
