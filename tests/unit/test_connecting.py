"""Why a connection is not made, by what gRPC says of it."""

from __future__ import annotations

import socket
import threading

import pytest

from specwire import Client
from specwire.config.link import ProxyConfig
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.rpc.connecting import PEER, explain

_HUNG = (
    "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Delayed close "
    "due to in-progress write (ping timeout) (goaway sent)"
)


def test_what_hangs_is_there() -> None:
    assert (
        explain(_HUNG, "a:1", PEER) == "nothing serves at a:1 (it accepts connections, and does not answer)"
    )


def test_a_server_of_http_1_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def answer() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
                connection.recv(1 << 16)
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with (
            Client(address, timeout_s=5) as client,
            pytest.raises(ServiceUnavailableError, match=f"{address} speaks HTTP/1.1, and not gRPC"),
        ):
            client.get_status()


def test_a_proxy_of_itself_is_refused() -> None:
    """One connection would take all descriptors."""
    with pytest.raises(ConfigError, match=r"--to 127.0.0.1:9: is --address itself"):
        ProxyConfig(to="127.0.0.1:9", listen="127.0.0.1:9")
