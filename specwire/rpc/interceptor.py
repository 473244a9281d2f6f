"""The one interceptor, which every call passes before its method, in this order:

    token ─▶ limits of its caller ─▶ first message, within 10 s ─▶ drain ─▶ method ─▶ status

Every method is registered as one that takes a stream. The bytes on the wire are the same, and limits hold
from the opening of a call; grpc.aio itself waits for the message of a unary call without a limit. Malformed
messages are refused as INVALID_ARGUMENT, where grpc.aio answers UNKNOWN with the name of a Python class.

A method, `async def (self, request or requests, context)`, raises our errors, which become the call's status.
One that streams writes through `context.write` rather than yield: a cancelled generator is only finalised
when it is collected, while a cancelled coroutine runs its `finally` at once.

Health checks need no token, since probes have none, and have limits of their own: a `Check` is answered
under any load.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from specwire.config.security.bearer import Principal, Tokens, bearer_token
from specwire.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ServiceDrainingError,
    SpecwireError,
    UnauthenticatedError,
)
from specwire.rpc import listening
from specwire.rpc.draining import Drain
from specwire.rpc.slots import Slots

_OURS = "/specwire."
_HEALTH = f"/{health.SERVICE_NAME}/"
_CHECK, _WATCH = f"{_HEALTH}Check", f"{_HEALTH}Watch"

_FIRST_MESSAGE_S = 10.0
# In addition to the streams that a service serves or queues: handshakes, and streams that it refuses.
NUM_PASSING_STREAMS = 64
_NUM_BUSY_CALLERS = 4
"""Callers that can hold their maximum of streams at the same time."""

_MAX_HEALTH_BYTES = 1 << 10
# A probe sends its message with its call; over this number, the oldest call without one is ended.
_MAX_SILENT_PROBES = 256
# A coordinator has a watch for each replica, gRPC's own health checking one for each connection; 25 kB each.
_MAX_WATCHES_OF_A_CONNECTION = 32
_MAX_WATCHES_OF_A_CALLER = 128
_MAX_WATCHES_WITHOUT_TOKEN = 1_024

Abort = Callable[[Any, Exception], Awaitable[None]]


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The one interceptor of a server.

    Attributes:
        on_refused: called with the method and the error of a call that ends before its method; not where the
            service drains, as its caller goes elsewhere then.
    """

    def __init__(self, tokens: Tokens | None, drain: Drain, capacity: tuple[int, int], abort: Abort) -> None:
        """Args:
        tokens: accepted bearer tokens; None requires none.
        drain: calls of our own methods run as its requests; health and reflection are served to the end.
        capacity: most streams that the service serves at a time, and most that it queues.
        abort: ends a call, given its context, with an error.
        """
        self._tokens = tokens
        self._drain = drain
        self._capacity = capacity
        self._max_streams = _NUM_BUSY_CALLERS * (sum(capacity) + NUM_PASSING_STREAMS)
        self._abort = abort
        self._streams, self._watches = Slots("streams"), Slots("health watches")
        self._opened = _FirstMessages(self._max_streams)
        self._probed = _FirstMessages(_MAX_SILENT_PROBES)
        self._calls: set[asyncio.Task[Any]] = set()
        self.on_refused: Callable[[str, SpecwireError], None] = lambda method, error: None

    async def ended(self) -> None:
        """Wait until the tasks of all calls have ended, which is after gRPC has ended the calls."""
        if self._calls:
            await asyncio.wait(self._calls)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """See `grpc.aio.ServerInterceptor`. Runs in the task of the call, like its method."""
        details, handler = handler_call_details, await continuation(handler_call_details)
        is_health = details.method.startswith(_HEALTH)
        serve = self._serve_health if is_health else self._serve

        async def served(_: Any, context: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            try:
                return await serve(handler, details, context)
            except Exception as error:
                await self._abort(context, error)

        if handler is None:
            return grpc.stream_stream_rpc_method_handler(served)
        responses = "stream" if handler.response_streaming else "unary"
        max_bytes = _MAX_HEALTH_BYTES if is_health else None
        return getattr(grpc, f"stream_{responses}_rpc_method_handler")(
            served,
            request_deserializer=functools.partial(_parse, handler.request_deserializer, max_bytes),
            response_serializer=handler.response_serializer,
        )

    async def _serve(self, handler: Any, details: Any, context: Any) -> Any:
        with contextlib.ExitStack() as held:
            try:
                first = await self._admitted(handler, details, context, held)
            except SpecwireError as error:
                if not isinstance(error, ServiceDrainingError):
                    self.on_refused(details.method, error)
                raise
            return await _run(handler, first, context)

    async def _admitted(self, handler: Any, details: Any, context: Any, held: contextlib.ExitStack) -> Any:
        """The first message of a call, which is within all limits while `held` is open."""
        principal = self._tokens.check(_bearer_token(details)) if self._tokens else None
        listening.principal.set(principal)
        if handler is None:
            await _refuse_unknown(context)
        caller = principal or Principal(name=_address(context))
        own = caller.capacity(self._capacity) + NUM_PASSING_STREAMS
        held.enter_context(self._streams.held({caller.name: own, "all callers": self._max_streams}))
        first = await self._opened.of(context)
        if details.method.startswith(_OURS):
            held.enter_context(self._drain.request())
        return first

    async def _serve_health(self, handler: Any, details: Any, context: Any) -> Any:
        if handler is None or details.method not in (_CHECK, _WATCH):
            await _refuse_unknown(context)
        watching = details.method == _WATCH
        with self._watches.held(self._watch_limits(details, context) if watching else {}):
            return await _run(handler, await self._probed.of(context), context)

    def _watch_limits(self, details: Any, context: Any) -> dict[str, int]:
        """Authenticated callers do not share a limit with unauthenticated ones."""
        connection = {context.peer(): _MAX_WATCHES_OF_A_CONNECTION}
        principal = None
        if self._tokens:
            with contextlib.suppress(UnauthenticatedError):
                principal = self._tokens.check(_bearer_token(details))
        if principal is not None:
            return connection | {principal.name: _MAX_WATCHES_OF_A_CALLER}
        unauthenticated = {"callers without a token": _MAX_WATCHES_WITHOUT_TOKEN}
        return connection | unauthenticated | {_address(context): _MAX_WATCHES_OF_A_CALLER}


class _FirstMessages:
    """Waits for the first messages of calls.

    Args:
        most: calls waited for at a time; one more ends the wait for the oldest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waits: dict[asyncio.Timeout, None] = {}

    async def of(self, context: Any) -> Any:
        """The first message of a call, if it is received in time; `grpc.aio.EOF` if it has none."""
        timeout = asyncio.timeout(_FIRST_MESSAGE_S)
        try:
            async with timeout:
                self._waits[timeout] = None
                if len(self._waits) > self._most:
                    oldest = next(iter(self._waits))
                    del self._waits[oldest]
                    if not oldest.expired():
                        oldest.reschedule(0)
                return await context.read()
        except TimeoutError:
            problem = f"first message: not received within {_FIRST_MESSAGE_S:g} s"
            raise DeadlineExceededError(problem) from None
        finally:
            self._waits.pop(timeout, None)


class _Requests:
    """All messages of a stream whose first has been read already.

    Not a generator, which a stream that ends early would leave to be finalised at garbage collection.
    """

    def __init__(self, first: Any, context: Any) -> None:
        self._read_before = [first]
        self._context = context

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        message = self._read_before.pop() if self._read_before else await self._context.read()
        if message is grpc.aio.EOF:
            self._read_before.append(message)
            raise StopAsyncIteration
        return _parsed(message)


async def _run(handler: Any, first: Any, context: Any) -> Any:
    """Call a method of any of the four kinds; returns its response if it is unary, and raises its errors."""
    streams = handler.request_streaming, handler.response_streaming
    behaviour = getattr(handler, "_".join("stream" if is_stream else "unary" for is_stream in streams))
    request = _Requests(first, context) if handler.request_streaming else _parsed(first)
    if not inspect.isasyncgenfunction(behaviour):
        return await behaviour(request, context)
    async with contextlib.aclosing(behaviour(request, context)) as responses:
        async for response in responses:
            await context.write(response)
    return None


def _parse(parse: Callable[[bytes], Any], max_bytes: int | None, data: bytes) -> Any:
    """The message, or the error of a malformed one, as a deserialiser must not raise in grpc.aio."""
    if max_bytes is not None and len(data) > max_bytes:
        return InvalidRequestError("request", f"{len(data)} bytes", f"is over the limit of {max_bytes} bytes")
    try:
        return parse(data)
    except DecodeError:
        return InvalidRequestError("request", f"{len(data)} bytes", "is not a message of this method's type")


def _parsed(message: Any) -> Any:
    """A result of `_parse`, unless it is malformed, or the call ended without a message."""
    if message is grpc.aio.EOF:
        raise InvalidRequestError("request", "none", "the method needs one message")
    if isinstance(message, InvalidRequestError):
        raise message
    return message


async def _refuse_unknown(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")


def _bearer_token(details: Any) -> str:
    headers = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    return bearer_token(headers[0]) if len(headers) == 1 and isinstance(headers[0], str) else ""


def _address(context: Any) -> str:
    """The caller's address without its port: `ipv4:10.0.0.1`."""
    return str(context.peer()).rpartition(":")[0]
