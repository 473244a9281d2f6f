"""Request bodies: read within limits of size, time and structure, and validated on another thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from specwire.config.client import HttpConfig
from specwire.http.bodies import validation
from specwire.http.bodies.part import Ignored, RequestBody
from specwire.http.errors import ApiError
from specwire.http.scan import Scan

_SMALL_BYTES = 64 << 10
_NUM_LARGE = 4
"""Bodies over 64 KiB in memory at a time; further ones are not read meanwhile."""
_READ_S = 30.0
_SLICE_BYTES = 64 << 10
"""Scanned at a time, for about a millisecond."""
Kind = TypeVar("Kind", bound=RequestBody)


class BodyReader:
    """Reads bodies; for one event loop."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._large = asyncio.Semaphore(_NUM_LARGE)
        self._thread = ThreadPoolExecutor(1, "http-body")

    async def read(
        self,
        kind: type[Kind],
        headers: Mapping[str, str],
        receive: Receive,
        context_len: int,
        ignored: Ignored | None,
    ) -> Kind:
        """The body of a request, checked.

        Args:
            context_len: of the model, in tokens.
            ignored: takes the names of unknown parameters; without it they are refused.

        Raises:
            ApiError: 413, over a limit; 408, not received in time; 400, naming the parameter.
            ClientDisconnect: the client disconnected before its end.
        """
        declared = _declared_bytes(headers)
        self._check_size(declared or 0)
        is_small = declared is not None and declared <= _SMALL_BYTES
        async with contextlib.nullcontext() if is_small else self._large:
            data = await self._in_time(receive, Scan(context_len, self._config.max_prompt_bytes))
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._checked, kind, data, ignored)

    async def _in_time(self, receive: Receive, scan: Scan) -> bytearray:
        try:
            async with asyncio.timeout(_READ_S):
                return await self._all(receive, scan)
        except TimeoutError:
            message = f"the body was not complete within {_READ_S:g} s"
            raise ApiError(408, message, code="request_timeout") from None

    async def _all(self, receive: Receive, scan: Scan) -> bytearray:
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


def _declared_bytes(headers: Mapping[str, str]) -> int | None:
    """The declared length of the body; None if it is chunked."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else None
