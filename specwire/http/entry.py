"""What precedes every answer: who asks, of which model, and the checked body.

Bodies are read within limits of size, time and structure, and validated on another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from specwire.config.client import HttpConfig
from specwire.config.security.bearer import bearer_token
from specwire.http.bodies import validation
from specwire.http.bodies.part import Ignored, RequestBody
from specwire.http.errors import ApiError
from specwire.http.model import Models, ServedModel
from specwire.http.scan import Scan
from specwire.telemetry.tracing import Span

_MAX_TOKEN_LEN = 4096
_SMALL_BYTES = 64 << 10
_NUM_LARGE = 4
"""Bodies over 64 KiB in memory at a time; further ones are not read meanwhile."""
_READ_S = 30.0
_SLICE_BYTES = 64 << 10
"""Scanned at a time, for about a millisecond."""
Kind = TypeVar("Kind", bound=RequestBody)


@dataclass(frozen=True)
class Caller:
    """The caller's bearer token, empty for none; and the id and the span of the request."""

    token: str
    request_id: str
    span: Span


class Entry:
    """Admits callers and reads their bodies; for one event loop."""

    def __init__(self, models: Models, config: HttpConfig) -> None:
        self._models = models
        self._config = config
        self._large = asyncio.Semaphore(_NUM_LARGE)
        self._thread = ThreadPoolExecutor(1, "http-body")

    async def model(self, request: Request) -> ServedModel:
        """The model that is served.

        Raises:
            ApiError: 401, a token that cannot be valid.
            UnauthenticatedError: the coordinator does not know the token.
            SpecwireError: the coordinator does not answer.
        """
        return await self._models.served(caller_of(request).token)

    async def body(self, request: Request, kind: type[Kind], model: ServedModel) -> Kind:
        """The body of a request, checked.

        Raises:
            ApiError: 415, no JSON; 413, over a limit; 408, not received in time; 400, naming the parameter;
                404, for another model.
            ClientDisconnect: the client disconnected before its end.
        """
        given = request.headers.get("content-type", "")
        # A page of another origin can send some other types without a CORS preflight.
        if given.partition(";")[0].strip().lower() != "application/json":
            message = f"Content-Type {given!r} is not application/json"
            raise ApiError(415, message, code="unsupported_media_type")
        length = request.headers.get("content-length", "")
        declared = int(length) if length.isdecimal() else None  # it is chunked
        self._check_size(declared or 0)
        is_small = declared is not None and declared <= _SMALL_BYTES
        async with contextlib.nullcontext() if is_small else self._large:
            try:
                async with asyncio.timeout(_READ_S):
                    scan = Scan(model.info.longest_len, self._config.max_prompt_bytes)
                    data = await self._received(request.receive, scan)
            except TimeoutError:
                message = f"the body was not complete within {_READ_S:g} s"
                raise ApiError(408, message, code="request_timeout") from None
            ignored = request.scope["specwire.ignored"]
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._thread, self._checked, kind, data, ignored)
        if body.model is not None:
            check_model(body.model, model)
        return body

    async def _received(self, receive: Receive, scan: Scan) -> bytearray:
        data = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            self._check_size(len(data) + len(chunk))
            for start in range(0, len(chunk), _SLICE_BYTES):
                scan.feed(chunk[start : start + _SLICE_BYTES])
                await asyncio.sleep(0)
            data += chunk
        return data

    def _check_size(self, num_bytes: int) -> None:
        limit = self._config.max_body_bytes
        if num_bytes > limit:
            raise ApiError(413, f"the body is over {limit} bytes", code="request_too_large")

    def _checked(self, kind: type[Kind], data: bytearray, ignored: Ignored | None) -> Kind:
        wanted = validation.read(kind, data, ignored)
        validation.check_size(wanted, self._config.max_prompt_bytes, self._config.max_body_bytes)
        return wanted


def caller_of(request: Request) -> Caller:
    """The caller of a request; ApiError 401 for a token that cannot be valid."""
    token = bearer_token(request.headers.get("authorization", ""))
    if token and not (token.isascii() and token.isprintable() and len(token) <= _MAX_TOKEN_LEN):
        message = f"the bearer token is not ASCII text of at most {_MAX_TOKEN_LEN} characters"
        raise ApiError(401, message, code="invalid_api_key")
    return Caller(token, request.scope["specwire.request_id"], request.scope["specwire.span"])


def check_model(name: str, model: ServedModel) -> None:
    """Refuse another model: ApiError 404."""
    if name not in model.names:
        served = ", ".join(map(repr, model.names))
        verb = "is" if len(model.names) == 1 else "are"
        message = f"The model {name!r} does not exist; {served} {verb} served."
        raise ApiError(404, message, param="model", code="model_not_found")
