"""Channels: keepalive, and credentials that are reloaded when their files change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from specwire.config.fields import DNS
from specwire.config.security.tls import PLAINTEXT, CredentialBundle, Credentials

_LONGEST_CALL_S = 7 * 24 * 3600.0

Options = Sequence[tuple[str, Any]]


def _keepalive(quiet_ms: int, answer_ms: int, ping_ms: int) -> Options:
    """Options that notice a silent peer by a ping.

    Args:
        quiet_ms: without traffic before the ping.
        answer_ms: without an answer after it; any data that arrives is one. Also gRPC's TCP_USER_TIMEOUT.
        ping_ms: without an answer to a bandwidth ping of gRPC, which replaces ours if it is in flight when
            the connection goes silent, and times out after a minute by default.
    """
    return [
        ("grpc.keepalive_time_ms", quiet_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", ping_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


BETWEEN_SERVICES = _keepalive(1_000, 1_000, 2_000)
TOWARDS_CLIENTS = _keepalive(10_000, 10_000, 10_000)
"""On both ends: a client that gets little processor time, or is stopped for seconds, is not lost."""
_CONNECT_TIMEOUT_MS = 5_000
_MAX_MESSAGE_BYTES = 64 << 20
_ROUND_ROBIN = [("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')]


def open_channel(
    address: str,
    *,
    credentials: Credentials = PLAINTEXT,
    keepalive: Options = BETWEEN_SERVICES,
    is_shared: bool = True,
) -> grpc.aio.Channel:
    """A channel to HOST:PORT, or to all addresses of `dns:///NAME:PORT`, which take calls in turn.

    Args:
        keepalive: how it detects a silent peer: `BETWEEN_SERVICES` within two seconds, `TOWARDS_CLIENTS`
            within twenty.
        is_shared: whether it may share its connection with equal channels of this process.

    Raises:
        InvalidRequestError: a token would travel in plaintext beyond this machine.
        ConfigError: a file that cannot be used.
    """
    options = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),  # addresses are direct, `http_proxy` or not
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),  # also the timeout of an attempt
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", int(not is_shared)),
        # gRPC resolves again when a connection ends, at most every 30 s by default: too seldom for a rolling
        # restart, where the address that it knows is that of the one that ends.
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        *keepalive,
        *(_ROUND_ROBIN if address.startswith(DNS) else ()),
    ]
    if credentials.none:
        return grpc.aio.insecure_channel(address, options=options)
    credentials.check(address)
    return _CredentialChannel(address, options, credentials)


class LeftChannels:
    """Connections that take no new calls: each is closed after its last one."""

    def __init__(self) -> None:
        self._closing: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    def add(self, channel: grpc.aio.Channel) -> None:
        """Leave this one."""
        self._closing[channel] = asyncio.create_task(self._close_after_calls(channel))

    async def _close_after_calls(self, channel: grpc.aio.Channel) -> None:
        await channel.close(grace=_LONGEST_CALL_S)
        del self._closing[channel]

    async def close(self, grace: float | None = None) -> None:
        """Close all of them now, or after so many seconds."""
        for channel, task in [*self._closing.items()]:
            task.cancel()
            await channel.close(grace)
        self._closing.clear()


def _made_again(kind: str) -> Callable[..., Callable[..., Any]]:
    """The methods of a channel that make a stub's method, which is created again for each new connection."""

    def make(channel: _CredentialChannel, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        made_for: grpc.aio.Channel | None = None
        method: Any = None

        def call(*given: Any, metadata: Any = None, **options: Any) -> Any:
            nonlocal made_for, method
            current = channel.current()
            if current is not made_for:
                made_for, method = current, getattr(current, kind)(*args, **kwargs)
            metadata = list(metadata or ())
            if all(key != "authorization" for key, _ in metadata):  # a call's own token takes precedence
                metadata += channel.metadata()
            return method(*given, metadata=metadata, **options)

        return call

    return make


class _CredentialChannel:
    """What stubs and callers need of a channel. It checks its files before each call: when they have changed,
    the call goes over a new connection, and the old one is closed after its last call."""

    def __init__(self, address: str, options: Options, credentials: Credentials) -> None:
        self._address = address
        self._options = [*options]
        self._tls = credentials.tls
        if self._tls and self._tls.server_name:
            self._options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        self._files = credentials.reloading()
        self._current = self._connect()
        self._left = LeftChannels()

    def current(self) -> grpc.aio.Channel:
        """The channel for a new call."""
        if self._files.refresh() and self._tls:
            old, self._current = self._current, self._connect()
            self._left.add(old)
        return self._current

    def metadata(self) -> list[tuple[str, str]]:
        """The credentials of a call."""
        token = self._files.value.token
        return [("authorization", f"Bearer {token}")] if token else []

    def _connect(self) -> grpc.aio.Channel:
        if not self._tls:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        current: CredentialBundle = self._files.value
        tls = grpc.ssl_channel_credentials(current.ca, current.key, current.cert)
        return grpc.aio.secure_channel(self._address, tls, options=self._options)

    async def close(self, grace: float | None = None) -> None:
        """Close this connection and those that were left; see `grpc.aio.Channel`."""
        await self._left.close(grace)
        await self._current.close(grace)

    async def __aenter__(self) -> _CredentialChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    unary_unary = _made_again("unary_unary")
    unary_stream = _made_again("unary_stream")
    stream_unary = _made_again("stream_unary")
    stream_stream = _made_again("stream_stream")
