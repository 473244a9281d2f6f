"""A gRPC server with health, reflection, limits and a graceful end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specwire import errors
from specwire.config.fields import split_address
from specwire.config.security.bearer import Tokens
from specwire.config.services import ServiceConfig
from specwire.errors import SpecwireError
from specwire.rpc import descriptors, listening
from specwire.rpc.channel import BETWEEN_SERVICES, TOWARDS_CLIENTS
from specwire.rpc.draining import Drain
from specwire.rpc.interceptor import NUM_PASSING_STREAMS, Interceptor
from specwire.rpc.statuses import to_status

log = logging.getLogger(__name__)

_STATUS_S = 2.0
_HUNG_S = 3.0
# Our own clients ping once a second; after a stall several pings may arrive at once. A peer that keeps
# pinging faster than four times a second is disconnected.
_PERMIT_KEEPALIVE = [
    ("grpc.http2.min_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 20),
]
# Further streams wait in the client; `interceptor` has the limits that refuse them.
_MAX_STREAMS_OF_A_CONNECTION = 8_192
_MIN_PENDING = 1_000  # gRPC's own default
_MAX_METADATA_BYTES = 16 << 10
CONNECTION_AGE_MS = 10_000
"""Behind a balancer of connections a client stays with one coordinator while its connection lasts. At this
age, more or less a tenth, gRPC asks for another one for new calls (GOAWAY); those that run stay on the old
one. A server that ends only after this time, while new connections lead elsewhere, refuses no call."""
_HANDSHAKE_TIMEOUT_MS = 10_000
_LIMITS = [
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_concurrent_streams", _MAX_STREAMS_OF_A_CONNECTION),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
]


class Server:
    """A gRPC server with health, reflection, one port and a graceful end.

    Attributes:
        drain: of its requests, including those that are served other than over gRPC.
        interceptor: of all its calls.
    """

    def __init__(
        self,
        config: ServiceConfig,
        service_names: Sequence[str],
        *,
        serves_clients: bool = False,
        shares_port: bool = False,
    ) -> None:
        """Args:
        serves_clients: whether its peers are clients rather than services: they may be slow to answer, and
            their connections are renewed, so that a balancer can place them anew.
        shares_port: with processes that `listening.reserved` keeps it for.
        """
        age = [("grpc.max_connection_age_ms", CONNECTION_AGE_MS)] if serves_clients else []
        # The calls of one method, 16 kB each, that gRPC queues for the event loop. Over the first limit, as
        # many as a caller may open at once, it cancels some of them, and over the second all.
        num_pending = max(sum(config.capacity) + NUM_PASSING_STREAMS, _MIN_PENDING)
        self._config = config
        self.drain = Drain()
        self._service_names = ["", *service_names]
        self._started = False
        options = [
            ("grpc.so_reuseport", int(shares_port)),  # else a port in use must be an error
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            *(TOWARDS_CLIENTS if serves_clients else BETWEEN_SERVICES),
            *age,
            *_PERMIT_KEEPALIVE,
            *_LIMITS,
            ("grpc.server.max_pending_requests", num_pending),
            ("grpc.server.max_pending_requests_hard_limit", num_pending + num_pending // 4),
            (
                "grpc.max_allowed_incoming_connections",
                max(1, descriptors.max_connections() - descriptors.num_open()),
            ),
        ]
        tokens = Tokens(config.tokens) if config.tokens else None
        self.interceptor = Interceptor(tokens, self.drain, config.capacity, _abort)
        self.grpc = grpc.aio.server(options=options, interceptors=[self.interceptor])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self, *, is_loading: bool = False) -> str:
        """Bind, serve, report healthy; returns the HOST:PORT that clients can use. Errors as for `add_port`.

        Args:
            is_loading: refuse requests, and report NOT_SERVING, until `loaded`.
        """
        host, _ = split_address("address", self._config.address)
        port = listening.add_port(self.grpc, self._config)
        self.drain.is_loading = is_loading
        await self.grpc.start()
        self._started = True
        await self.set_serving(not is_loading)
        return f"{host}:{port}"

    async def loaded(self) -> None:
        """Serve from now on, and report healthy."""
        self.drain.is_loading = False
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        """Set the `grpc.health.v1` status of every service."""
        check = health_pb2.HealthCheckResponse
        status = check.SERVING if serving else check.NOT_SERVING
        for name in self._service_names:
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Drain, then end: at the latest after the grace period, or at once when this is cancelled. Once.

        Health reports NOT_SERVING and new requests are refused with UNAVAILABLE from the start, on old and
        new connections, while running requests and streams continue.

        gRPC's own stop comes last. It says GOAWAY at once, but cancels what is under way: of 64 callers in a
        loop 35 to 63 had one call end as CANCELLED, which nobody retries. At a connection's age gRPC says
        GOAWAY while all is served, and loses none; see `CONNECTION_AGE_MS`.
        """
        if not self._started:
            return
        self._started = False
        self.drain.close()
        try:
            await self._health.enter_graceful_shutdown()
            if not await self.drain.idle(self._config.grace_s):
                log.warning("the grace period is over: cancelling %d requests", self.drain.num_running)
        finally:
            # Requests that have just finished still send their status.
            await self._stop_grpc(0 if self.drain.num_running else min(self._config.grace_s, _STATUS_S))

    async def _stop_grpc(self, grace_s: float) -> None:
        """End gRPC, or leave calls that it cannot end: requests have finished or been given up by now."""
        try:
            async with asyncio.timeout(grace_s + _HUNG_S):
                await self.grpc.stop(grace_s)
                # Calls whose peers leave at this moment: gRPC would report tasks that the loop's end cancels.
                await self.interceptor.ended()
        except TimeoutError:
            log.warning("gRPC has not ended its calls within %g s: leaving them", grace_s + _HUNG_S)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.InternalError) and not context.done():
        # Cancelled while it was written to: not a defect.
        error = errors.RequestCancelledError("the stream ended while it was written to")
    if isinstance(error, grpc.aio.BaseError):  # the call is aborted already, or the server has ended
        raise error
    if not isinstance(error, SpecwireError):
        log.error("defect while serving a request", exc_info=error)
        error = errors.InternalError("internal error; the service's log has the details")
    status = to_status(error)
    context.set_trailing_metadata(status.trailing_metadata)
    try:
        async with asyncio.timeout(_STATUS_S):
            await context.abort(status.code, status.details)
    except TimeoutError:  # gRPC withholds the status until the client has read all messages
        raise asyncio.CancelledError from None
