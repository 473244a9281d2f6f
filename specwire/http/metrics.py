"""`GET /metrics`: those of the coordinator, passed on from its own endpoint (`--metrics-from`)."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from specwire.config.client import HttpConfig
from specwire.config.fields import split_address
from specwire.http.entry import Entry
from specwire.http.errors import ApiError

_OFF = (
    "metrics are not served here: `serve` needs the extra (pip install '.[metrics]'), `up` "
    "--metrics-address, `http` --metrics-from with the coordinator's --metrics-address"
)
_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20


class MetricsProxy:
    """Asks the coordinator's endpoint; a caller needs the same token as for a generation."""

    def __init__(self, entry: Entry, config: HttpConfig) -> None:
        self._entry = entry
        self._address = config.metrics_from

    async def metrics(self, request: Request) -> Response:
        """The coordinator's metrics."""
        await self._entry.model(request)
        if not self._address:
            raise ApiError(404, _OFF, code="metrics_off")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._passed_on(request.headers.get("accept", "*/*"))
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            message = f"no metrics from {self._address}: {error or type(error).__name__}"
            raise ApiError(503, message, kind="service_unavailable_error", code="unavailable") from None

    async def _passed_on(self, accept: str) -> Response:
        host, port = split_address("metrics_from", self._address)
        reader, writer = await asyncio.open_connection(host.strip("[]"), port)
        try:
            head = f"GET /metrics HTTP/1.1\r\nHost: {self._address}\r\nAccept: {accept}\r\n\r\n"
            writer.write(head.encode("latin-1"))
            fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            named = dict(field.lower().split(": ", 1) for field in fields[1:] if ": " in field)
            num_bytes = int(named["content-length"])
            if not fields[0].startswith("HTTP/1.1 200 ") or num_bytes > _MAX_BYTES:
                raise ValueError(fields[0])
            return Response(
                await reader.readexactly(num_bytes), headers={"content-type": named["content-type"]}
            )
        finally:
            writer.close()
