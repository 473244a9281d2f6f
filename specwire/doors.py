"""The server's side of doors: TLS from files that may be replaced, and a token in every request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health

from specwire.config import DoorConfig
from specwire.credentials import read_authorities, read_pair
from specwire.errors import SpecwireError, UnauthenticatedError
from specwire.tokens import Holder, Tokens, bearer_token
from specwire.watched import Watched

log = logging.getLogger(__name__)

_HEALTH = f"/{health.SERVICE_NAME}/"
_holder: ContextVar[Holder | None] = ContextVar("holder", default=None)

Abort = Callable[[Any, Exception], Awaitable[None]]


class _Pem(NamedTuple):
    cert: bytes
    key: bytes
    client_ca: bytes | None


def check(config: DoorConfig) -> None:
    """Read all files now, rather than after a model was loaded.

    Raises:
        ConfigError: a file that cannot be used.
    """
    if config.tls_cert:
        _read_pem(config)
    if config.tokens:
        Tokens(config.tokens)


def add_port(server: grpc.aio.Server, config: DoorConfig) -> int:
    """Listen at the config's address, behind TLS if it has files for that.

    Returns:
        The port; 0 when the address cannot be bound.

    Raises:
        ConfigError: a file that cannot be used.
    """
    try:
        if config.tls_cert:
            return int(server.add_secure_port(config.address, _server_credentials(config)))
        return int(server.add_insecure_port(config.address))
    except RuntimeError:
        return 0


def _server_credentials(config: DoorConfig) -> grpc.ServerCredentials:
    """gRPC asks at every new connection; those that are open keep what they began with."""
    files = [path for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path]
    watched = Watched(files, lambda: _read_pem(config))

    def newer() -> Any:
        if not watched.refresh():
            return None
        log.warning("TLS files changed: new connections are served with them")
        return _configuration(watched.value)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(watched.value), newer, require_client_authentication=bool(config.tls_client_ca)
    )


def _read_pem(config: DoorConfig) -> _Pem:
    cert, key = read_pair("--tls-cert", config.tls_cert, "--tls-key", config.tls_key)
    ca = config.tls_client_ca
    return _Pem(cert, key, read_authorities("--tls-client-ca", ca) if ca else None)


def _configuration(pem: _Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.client_ca)


def interceptors(config: DoorConfig, abort: Abort) -> Sequence[grpc.aio.ServerInterceptor]:
    """What every request passes before it reaches a servicer.

    Args:
        abort: ends a request with an error.

    Raises:
        ConfigError: a tokens file that cannot be used.
    """
    return [_TokenDoor(Tokens(config.tokens), abort)] if config.tokens else []


class _TokenDoor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets in who shows a token; health checks need none, since probes have none."""

    def __init__(self, tokens: Tokens, abort: Abort) -> None:
        self._tokens = tokens
        self._abort = abort

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """See `grpc.aio.ServerInterceptor`. Runs in the task of the request, as its servicer does."""
        if not details.method.startswith(_HEALTH):
            try:
                _holder.set(self._tokens.check(_shown_token(details.invocation_metadata)))
            except UnauthenticatedError as error:
                return self._refusal(error)
        return await continuation(details)

    def _refusal(self, error: SpecwireError) -> Any:
        """A method that ends without reading what was sent to it, whatever its kind."""

        async def refuse(_: Any, context: Any) -> None:
            await self._abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _shown_token(metadata: Any) -> str:
    headers = [value for key, value in metadata or () if key == "authorization"]
    return bearer_token(headers[0]) if len(headers) == 1 and isinstance(headers[0], str) else ""


def caller(context: Any) -> Holder:
    """Whose request it is: a token's holder, or, where no tokens are asked for, an address without limits."""
    return _holder.get() or Holder(name=context.peer())
