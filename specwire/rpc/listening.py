"""The server's listening address: TLS from files that may be replaced, and the principal of a call."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from specwire.config.fields import split_address
from specwire.config.parts import ListenConfig
from specwire.config.security.bearer import Principal, Tokens
from specwire.config.security.reloading import ReloadingFile
from specwire.config.security.tls import read_authorities, read_pair
from specwire.errors import ConfigError

log = logging.getLogger(__name__)

principal: ContextVar[Principal | None] = ContextVar("principal", default=None)
"""Authenticated by the token of the call being served; None where no token is required."""


def check(config: ListenConfig) -> None:
    """Check all files now, rather than after a model is loaded; `ConfigError` for one that cannot be used."""
    if config.tls_cert:
        _read_pem(config)
    if config.tokens:
        Tokens(config.tokens)


def add_port(server: grpc.aio.Server, config: ListenConfig) -> int:
    """Listen at the config's address, with TLS if the config has a certificate; returns the port.

    Raises:
        ConfigError: the address cannot be bound, or a file cannot be used.
    """
    port = 0
    with contextlib.suppress(RuntimeError):
        if config.tls_cert:
            port = server.add_secure_port(config.address, _server_credentials(config))
        else:
            port = server.add_insecure_port(config.address)
    if not port:
        raise ConfigError(f"--address {config.address}: cannot be bound (in use, or not of this machine)")
    return int(port)


@contextlib.contextmanager
def reserved(address: str) -> Iterator[str]:
    """Keep a port for processes that share it, while the body runs; yields its `HOST:PORT`.

    The port is bound as that of a single process is, so that one in use is refused, and opened to our
    processes afterwards. Without a listener here, the kernel gives each new connection to one of them.

    Raises:
        ConfigError: the address cannot be bound.
    """
    host, port = split_address("address", address)
    name = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as kept:
        try:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended
            kept.bind((name, port))
        except OSError as error:
            raise ConfigError(f"--address {address}: cannot be bound ({error.strerror or error})") from None
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield f"{host}:{kept.getsockname()[1]}"


def _server_credentials(config: ListenConfig) -> grpc.ServerCredentials:
    """gRPC asks for them at every new connection; open connections keep theirs."""
    paths = [path for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path]
    files = ReloadingFile(paths, lambda: _read_pem(config))

    def reloaded() -> Any:
        if not files.refresh():
            return None
        log.warning("TLS files changed: new connections are served with them")
        return files.value

    return grpc.dynamic_ssl_server_credentials(
        files.value, reloaded, require_client_authentication=bool(config.tls_client_ca)
    )


def _read_pem(config: ListenConfig) -> Any:
    cert, key = read_pair("--tls-cert", config.tls_cert, "--tls-key", config.tls_key)
    ca = read_authorities("--tls-client-ca", config.tls_client_ca) if config.tls_client_ca else None
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def metadata(context: Any) -> list[tuple[str, str]]:
    """The headers of a call that are text."""
    return [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]


def caller(context: Any) -> Principal:
    """The principal of a request: that of its token or, without tokens, its peer without limits."""
    return principal.get() or Principal(name=context.peer())
