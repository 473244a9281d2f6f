"""The process: uvicorn on one socket, with graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import uvicorn

from specwire import AsyncClient, RetryPolicy
from specwire.config.client import HttpConfig
from specwire.config.fields import split_address
from specwire.config.security.reloading import ReloadingFile
from specwire.config.security.tls import read_pair
from specwire.errors import ConfigError
from specwire.http.app import Front
from specwire.http.connections import KEEP_ALIVE_S, Connection, Connections, ListeningSocket
from specwire.http.metrics import TABLE
from specwire.telemetry import endpoint, tracing
from specwire.telemetry.metrics import Group

log = logging.getLogger(__name__)

_SEND_BUFFER_BYTES = 64 << 10
"""Of a connection, in the kernel; small, so that a client that stops reading pauses its generation soon."""

_LAST_EVENTS_S = 0.5
"""For the errors of cancelled generations to be sent."""


@contextlib.asynccontextmanager
async def serving(config: HttpConfig) -> AsyncIterator[str]:
    """A running front; yields its `HOST:PORT`, and shuts down gracefully.

    It starts before its coordinator answers, which `/health` reports.

    Raises:
        ConfigError: the address cannot be bound, certificate and key cannot be read, or an `OTEL_*` variable
            has an invalid value.
    """
    host, _ = split_address("address", config.address)
    tracer = tracing.configure("specwire-http")
    listening = _bound(config.address, shares_port=config.workers > 1)
    client = AsyncClient(
        config.server,
        timeout_s=config.timeout_s,
        retry=RetryPolicy(patience_s=config.patience_s),
        tls=config.server_tls,
        allow_plaintext=config.allow_plaintext,
        tracer=tracer,
    )
    front = Front(client, config, tracer)
    metrics = Group(TABLE, lambda: front.counts)
    async with client, endpoint.serving(config.metrics_address, [metrics], tracer, "http"):
        connections = Connections(config.idle_timeout_s)
        listening.greeted = connections if config.tls_cert else None
        server = _Server(_settings(config, front, connections))
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"{host}:{listening.getsockname()[1]}"
        finally:
            await _drain(server, connections, running, client, config.grace_s)
            await asyncio.to_thread(tracer.shutdown)


async def _drain(
    server: uvicorn.Server,
    connections: Connections,
    running: asyncio.Task[None],
    client: AsyncClient,
    grace_s: float,
) -> None:
    """Have clients close their connections, and wait for running requests. At the end of the grace period, or
    when cancelled, their generations are cancelled: each response ends with its error."""
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(grace_s):
            await connections.closed_by_clients()
            server.should_exit = True
            await asyncio.shield(running)
    server.should_exit = True
    if not running.done():
        await client.close()
        await asyncio.wait([running], timeout=_LAST_EVENTS_S)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # of clients that read nothing, or have not sent all
        await asyncio.wait([running], timeout=_LAST_EVENTS_S)
        server.force_exit = True
    await running


class _Server(uvicorn.Server):
    """Leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _settings(config: HttpConfig, front: Front, connections: Connections) -> uvicorn.Config:
    settings = uvicorn.Config(
        front.app(connections),
        http=functools.partial(Connection, connections),  # type: ignore[arg-type]
        timeout_keep_alive=int(KEEP_ALIVE_S),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    settings.load()
    settings.ssl = _tls(config) if config.tls_cert else None
    return settings


def _tls(config: HttpConfig) -> ssl.SSLContext:
    """Serves each new connection with the current files; raises ConfigError of invalid ones."""
    files = ReloadingFile([config.tls_cert, config.tls_key], lambda: _read_context(config))

    def use_current(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        if files.refresh():
            log.warning("TLS files changed: new connections are served with them")
        connection.context = files.value

    context = files.value
    context.sni_callback = use_current  # called for each connection, whether it names a server or not
    return context


def _read_context(config: HttpConfig) -> ssl.SSLContext:
    read_pair("--tls-cert", config.tls_cert, "--tls-key", config.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except OSError as error:  # changed since; includes ssl.SSLError
        raise ConfigError(f"--tls-cert {config.tls_cert}: cannot be used ({error})") from None
    return context


def _bound(address: str, *, shares_port: bool) -> ListeningSocket:
    """A socket that listens; raises ConfigError if the address is in use, or not of this machine.

    Args:
        shares_port: with processes that `listening.reserved` keeps it for.
    """
    host, port = split_address("address", address)
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=1024, reuse_port=shares_port)
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(f"--address {address}: cannot be bound ({problem})") from None
    listening = ListeningSocket(fileno=bound.detach())
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listening.setblocking(False)
    return listening
