"""Request bytes that are no message: refused as INVALID_ARGUMENT, whoever serves the method.

Left alone, grpc.aio answers them with UNKNOWN and the name of a Python class, and logs a traceback for each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from specwire.errors import InvalidRequestError

Abort = Callable[[Any, Exception], Awaitable[None]]


class RefuseUnreadable(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Gives every method a deserialiser that does not raise, and refuses where the message would be used.

    Args:
        abort: ends a call, given its context, with an error.
    """

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._guarded: dict[str, Any] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """See grpc; None stands for a method that nobody serves."""
        method = handler_call_details.method
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[method] = _guarded(handler, self._abort)
        return self._guarded[method]


def _guarded(handler: Any, abort: Abort) -> Any:
    """The same handler, but for what it makes of bytes that are no message."""
    streams = handler.request_streaming, handler.response_streaming
    name = "_".join("stream" if is_stream else "unary" for is_stream in streams)
    behaviour = getattr(handler, name)
    readable: Any = _ReadableStream if handler.request_streaming else _readable
    serve = _yielding if inspect.isasyncgenfunction(behaviour) else _returning
    return handler._replace(
        request_deserializer=functools.partial(_read, handler.request_deserializer),
        **{name: serve(behaviour, readable, abort)},
    )


def _read(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """The message, or what is wrong with the bytes."""
    try:
        return parse(data)
    except DecodeError:
        return InvalidRequestError("request", f"{len(data)} bytes", "is not a message of this method's type")


def _readable(message: Any) -> Any:
    if isinstance(message, InvalidRequestError):
        raise message
    return message


class _ReadableStream:
    """No generator: a stream that ends early would leave one to be finalised whenever it is collected."""

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self._messages = aiter(messages)

    def __aiter__(self) -> _ReadableStream:
        return self

    async def __anext__(self) -> Any:
        return _readable(await anext(self._messages))


def _returning(behaviour: Any, readable: Callable[[Any], Any], abort: Abort) -> Any:
    async def serve(request: Any, context: Any) -> Any:
        try:
            return await behaviour(readable(request), context)
        except InvalidRequestError as error:
            await abort(context, error)

    return serve


def _yielding(behaviour: Any, readable: Callable[[Any], Any], abort: Abort) -> Any:
    async def serve(request: Any, context: Any) -> Any:
        try:
            async for response in behaviour(readable(request), context):
                yield response
        except InvalidRequestError as error:
            await abort(context, error)

    return serve
