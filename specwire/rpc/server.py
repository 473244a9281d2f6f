"""The thin edge to gRPC: statuses, servers, channels. Behaviour lives elsewhere.

An error travels as its status code plus a `google.rpc.ErrorInfo` whose `reason` names the type and
whose metadata carries the fields, so both sides raise the same class (`specwire.errors`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from specwire import errors
from specwire.config.fields import split_address
from specwire.config.services import ServiceConfig
from specwire.errors import ConfigError, SpecwireError
from specwire.rpc import channel, descriptors
from specwire.rpc import listening as doors
from specwire.rpc.draining import Drain
from specwire.rpc.interceptor import NUM_PASSING_STREAMS, Interceptor
from specwire.security.bearer import Tokens
from specwire.security.tls import PLAINTEXT, Credentials
from specwire.telemetry import stacks

log = logging.getLogger(__name__)

_DOMAIN = "specwire"
_BY_REASON: dict[str, type[SpecwireError]] = {
    error.reason: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, SpecwireError) and error is not SpecwireError
}
_BY_STATUS: dict[grpc.StatusCode, type[SpecwireError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.ServiceUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    grpc.StatusCode.CANCELLED: errors.RequestCancelledError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhaustedError,
}
# A client takes 8 KiB of metadata, in which a message is twice: percent-encoded, with three bytes for one at
# worst, and with the fields in base64.
_MAX_MESSAGE_BYTES = 1_000
_MAX_FIELDS_BYTES = 1_500
_CUT = "..."

# A silent partition is noticed by pings: after one second without traffic, and one more without an answer.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_000),
    # A ping of gRPC's own (it measures bandwidth) that is under way when the line goes silent takes the place
    # of ours, and would be waited for during a minute.
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CONNECT_TIMEOUT_MS = 5_000
_FAREWELL_S = 2.0
_HUNG_S = 3.0
_OURS = "/specwire."
# Our own clients ping once a second; after a stall several may arrive at once. A peer that keeps pinging
# faster than four times a second is disconnected.
_PERMIT_KEEPALIVE = [
    ("grpc.http2.min_ping_interval_without_data_ms", 250),
    ("grpc.http2.max_ping_strikes", 20),
]
# Over it a client's further streams wait in the client; `interceptor` has the limits that refuse them.
_MAX_STREAMS_OF_A_CONNECTION = 8_192
_MIN_PENDING = 1_000  # gRPC's own default
_MAX_METADATA_BYTES = 16 << 10
_HANDSHAKE_TIMEOUT_MS = 10_000
_LIMITS = [
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_concurrent_streams", _MAX_STREAMS_OF_A_CONNECTION),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
]


# --- errors ---------------------------------------------------------------------------------------


def to_status(error: SpecwireError) -> Any:
    """The gRPC status that an error travels as; what is too long for that is cut."""
    fields = error.details()
    room = _MAX_FIELDS_BYTES // max(1, len(fields))
    metadata = {name: _cut(value, room) for name, value in fields.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=metadata)
    message = _cut(str(error), _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=message)
    status.details.add().Pack(info)
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_after_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(status)


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    return data[: max_bytes - len(_CUT)].decode(errors="ignore") + _CUT


def from_rpc_error(error: grpc.RpcError) -> SpecwireError:
    """The error that the peer raised, or the one that the status or the failed transport stands for."""
    info = _error_info(error)
    if info is not None:
        with contextlib.suppress(KeyError, ValueError):  # no error of ours, or other fields than that has
            return _rebuild(_BY_REASON[info.reason], dict(info.metadata), error.details() or "")
    kind = _BY_STATUS.get(error.code(), errors.InternalError)
    return kind(f"{error.code().name}: {error.details()}")


def was_reported(error: grpc.RpcError) -> bool:
    """Whether the peer itself said what is wrong; else it is gone, or whatever lies between is."""
    return _error_info(error) is not None


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """What the peer says of its error; None if that is nothing, or bytes that are no such message."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            with contextlib.suppress(DecodeError):
                for detail in status_pb2.Status.FromString(value).details:
                    info = error_details_pb2.ErrorInfo()
                    if detail.Unpack(info) and info.domain == _DOMAIN:
                        return info
    return None


def _rebuild(kind: type[SpecwireError], fields: dict[str, str], message: str) -> SpecwireError:
    """Raises:
    KeyError, ValueError: a field is missing, or is no number.
    """
    if issubclass(kind, errors.InvalidRequestError):
        return kind(fields["field"], fields["value"], fields["problem"])
    if kind is errors.PrefixMismatchError:
        return errors.PrefixMismatchError(_count(fields["base_len"]), _count(fields["held_len"]))
    if issubclass(kind, errors.ResourceExhaustedError | errors.ServiceUnavailableError):
        return kind(message, _count(fields["retry_after_ms"]) if "retry_after_ms" in fields else None)
    return kind(message)


def _count(text: str) -> int:
    """A number of a peer's; any other text, and one that has no end, is a ValueError."""
    if not re.fullmatch("[0-9]{1,10}", text):
        raise ValueError
    return int(text)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, grpc.aio.InternalError) and not context.done():
        # Written to in the moment that it was cancelled: no defect.
        error = errors.RequestCancelledError("the stream ended while it was written to")
    if isinstance(error, grpc.aio.BaseError):  # gRPC's own: the call was aborted before, or the server ended
        raise error
    if not isinstance(error, SpecwireError):
        log.error("defect while serving a request", exc_info=error)
        error = errors.InternalError("internal error; the service's log has the details")
    status = to_status(error)
    context.set_trailing_metadata(status.trailing_metadata)
    try:
        async with asyncio.timeout(_FAREWELL_S):
            await context.abort(status.code, status.details)
    except TimeoutError:  # gRPC keeps it until the client has read what was written before
        raise asyncio.CancelledError from None


# --- servers --------------------------------------------------------------------------------------


class Server:
    """A gRPC server with health, reflection, one port and a graceful end.

    Attributes:
        drain: of its requests; who serves the same things in another way counts them here too.
    """

    def __init__(self, config: ServiceConfig, service_names: Sequence[str]) -> None:
        self._config = config
        self.drain = Drain()
        self._service_names = ["", *service_names]
        self._started = False
        options = [
            ("grpc.so_reuseport", 0),  # a port in use must be an error, not a shared port
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            *_KEEPALIVE,
            *_PERMIT_KEEPALIVE,
            *_LIMITS,
            *_pending_limits(config),
            ("grpc.max_allowed_incoming_connections", descriptors.max_connections()),
        ]
        tokens = Tokens(config.tokens) if config.tokens else None
        self.grpc = grpc.aio.server(
            options=options,
            interceptors=[Interceptor(tokens, self.drain, config.capacity, _abort)],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self) -> str:
        """Bind, serve, report healthy.

        Returns:
            HOST:PORT that clients can use.

        Raises:
            ConfigError: when the address cannot be bound, or a TLS file cannot be used.
        """
        host, _ = split_address("address", self._config.address)
        port = doors.add_port(self.grpc, self._config)
        if port == 0:
            raise ConfigError(
                f"--address {self._config.address}: cannot be bound (in use, or not of this machine)"
            )
        await self.grpc.start()
        self._started = True
        await self.set_serving(True)
        return f"{host}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """What `grpc.health.v1` says of every service here."""
        check = health_pb2.HealthCheckResponse
        status = check.SERVING if serving else check.NOT_SERVING
        for name in self._service_names:
            await self._health.set(name, status)

    async def stop(self) -> None:
        """Drain, then end: at the latest when the grace is over, or at once when this is cancelled.

        From the first moment on, health says NOT_SERVING and new requests are refused with UNAVAILABLE, on
        connections old and new, while those that run go on, streams of many requests included.
        """
        if not self._started:
            return
        self.drain.close()
        try:
            await self._health.enter_graceful_shutdown()
            if not await self.drain.idle(self._config.grace_s):
                log.warning("the grace is over: cutting off %d requests", self.drain.num_running)
        finally:
            # Whoever has just finished still sends its status.
            await self._stop_grpc(0 if self.drain.num_running else min(self._config.grace_s, _FAREWELL_S))

    async def _stop_grpc(self, grace_s: float) -> None:
        """Requests have ended or were given up by now: nothing is lost with what gRPC itself cannot end."""
        try:
            async with asyncio.timeout(grace_s + _HUNG_S):
                await self.grpc.stop(grace_s)
        except TimeoutError:
            log.warning("gRPC has not ended its calls within %g s: going without", grace_s + _HUNG_S)


def _pending_limits(config: ServiceConfig) -> list[tuple[str, int]]:
    """Of the calls of one method, 16 kB each, that gRPC keeps until the event loop takes them. Over the first
    number, which a caller may open at once, it cancels some of them, and over the second one all."""
    num = max(sum(config.capacity) + NUM_PASSING_STREAMS, _MIN_PENDING)
    return [
        ("grpc.server.max_pending_requests", num),
        ("grpc.server.max_pending_requests_hard_limit", num + num // 4),
    ]


async def run_until_signal(serving: AbstractAsyncContextManager[str]) -> None:
    """Enter a service, print `ready HOST:PORT` on standard output, and leave it at SIGINT or SIGTERM.

    A second signal cuts off what the first one left running.
    """
    descriptors.set_up()
    stopping, hurrying = asyncio.Event(), False
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        nonlocal hurrying
        if stopping.is_set():
            hurrying = True
            task.cancel()
        stopping.set()

    try:
        await _serve_until(serving, stopping, stop)
    except asyncio.CancelledError:
        if not hurrying:
            raise


async def _serve_until(
    serving: AbstractAsyncContextManager[str], stopping: asyncio.Event, stop: Callable[[], None]
) -> None:
    async with serving as address:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        # What was loaded stays: to look through all of it again in every full collection stops the service
        # for over 100 ms.
        gc.collect()
        gc.freeze()
        print(f"ready {address}", flush=True)
        await stopping.wait()


def end_at_once_by_signals() -> None:
    """Until a service serves there is nothing to finish: SIGINT and SIGTERM end it, whatever it waits for.
    Left to itself, asyncio would put SIGINT off until a model is loaded."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def set_up_logging(level: str) -> None:
    """Records of this level and above, on standard error."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def run_service(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run a service to its end; a SpecwireError becomes one line on standard error and exit status 2."""
    stacks.show_on_signal()
    try:
        asyncio.run(main())
    except SpecwireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


# --- channels -------------------------------------------------------------------------------------


def open_channel(
    address: str, max_message_bytes: int = 64 << 20, *, credentials: Credentials = PLAINTEXT
) -> grpc.aio.Channel:
    """A channel that notices a silent peer within about two seconds. Errors as for `channel.open_channel`."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_http_proxy", 0),  # our addresses are meant as they are, `http_proxy` or not
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),  # how long gRPC waits for a connection
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        *_KEEPALIVE,
    ]
    return channel.open_channel(address, options, credentials)


async def send(call: Any, request: Any) -> None:
    """Write to a stream that one's own side opened; if it has ended, its reader is the one to learn why.

    `call.write` does not leave it at that. When it fails, as it does on a stream that the server has just
    ended, it makes INTERNAL the status of the call, which hides the true one and all that is still unread.
    """
    try:
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError):
            await call.wait_for_connection()
            await call._cython_call.send_serialized_message(request.SerializeToString())
    except asyncio.CancelledError:
        call.cancel()
        raise
