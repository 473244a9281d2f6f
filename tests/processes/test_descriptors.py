"""Processes with few file descriptors: connections over that are shed, those that are open go on."""

from __future__ import annotations

import contextlib
import http.client
import selectors
import socket
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest

from specwire.config.fields import split_address
from specwire.v1 import verify_pb2, verify_pb2_grpc
from tests.support.processes import Command, running, wait_until

LIMIT = 200
NUM_STRANGERS = 250
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What a client says first, with empty settings."""


@contextlib.contextmanager
def limited(limits: str, *argv: str) -> Iterator[tuple[Command, str]]:
    """A command under limits, which a shell sets, and its address."""
    with running(*argv, prefix=("bash", "-c", f'{limits}; exec "$@"', "-")) as command:
        yield command, command.ready_line().split()[1]


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for each in opened:
        each.close()


def connect(address: str) -> socket.socket:
    return socket.create_connection(split_address("address", address), timeout=10)


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


def test_a_grpc_server_sheds_connections_and_keeps_descriptors(strangers: list[socket.socket]) -> None:
    limits = f"ulimit -n {LIMIT}"
    argv = ("verify", "--model", "emulated:", "--address", "127.0.0.1:0")
    with limited(limits, *argv) as (service, address), grpc.insecure_channel(address) as channel:
        ask = verify_pb2_grpc.VerifyServiceStub(channel).GetModelInfo
        request = verify_pb2.VerifyServiceGetModelInfoRequest()
        ask(request, timeout=30)
        for _ in range(NUM_STRANGERS):
            strangers.append(connect(address))
            with contextlib.suppress(ConnectionError):
                strangers[-1].sendall(HTTP2)
        wait_until(lambda: num_closed(strangers) >= NUM_STRANGERS - LIMIT * 3 // 4, 20)
        num_held = psutil.Process(service.process.pid).num_fds()
        assert num_held < LIMIT - 10, "others are left for files and peers"
        ask(request, timeout=30)
        wait_until(lambda: "file descriptors are open" in service.errors(), 20)
        assert service.errors().count("file descriptors are open") == 1, service.errors()


def test_asyncios_servers_log_no_traceback_for_each_connection(strangers: list[socket.socket]) -> None:
    """The HTTP front: 19 MB in ten seconds without this."""
    argv = ("http", "--address", "127.0.0.1:0", "--server", "127.0.0.1:1")
    with limited("ulimit -n 60", *argv) as (front, address):
        assert is_answered(address)
        strangers += [connect(address) for _ in range(100)]
        wait_until(lambda: "are open" in front.errors(), 20)
        # In the middle of the flood it may be among those closed.
        wait_until(lambda: is_answered(address), 20)
        time.sleep(1.2)  # asyncio tries again every second
        assert is_answered(address)
        said = front.errors()
    assert "Traceback" not in said
    assert 1 <= len(said.splitlines()) <= 2, said  # too many connections, too few descriptors


def is_answered(address: str) -> bool:
    """A client of now: those without a request have made room for it."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        try:
            connection.request("GET", "/none")
            return connection.getresponse().status == 404
        except ConnectionError:
            return False


def test_the_soft_limit_is_raised() -> None:
    limits = "ulimit -S -n 100; ulimit -H -n 300"
    with limited(limits, "proxy", "--to", "127.0.0.1:1") as (proxy, _):
        own = psutil.Process(proxy.process.pid)
        wait_until(lambda: own.rlimit(psutil.RLIMIT_NOFILE)[0] == 300, 20)
