"""The endpoint `GET /metrics` of a service, in Prometheus' text format or in OpenMetrics'.

Without an address nothing listens, and prometheus_client is not imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specwire.config.fields import split_address
from specwire.config.models import VLLM
from specwire.errors import ConfigError
from specwire.telemetry import tracing, vllm_names
from specwire.telemetry.metrics import TRACING, Group

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_MAX_CONNECTIONS = 8
_MAX_HEAD_BYTES = 8192
_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def serving(
    address: str, groups: Sequence[Group[Any]], tracer: tracing.Tracing, role: str, names: str = ""
) -> AsyncIterator[None]:
    """Serve these metrics, those of tracing and those of the process at `http://HOST:PORT/metrics` meanwhile.

    Args:
        address: HOST:PORT; empty to serve nothing.
        role: of the service; a label of the metrics that all services have.
        names: `vllm` for that engine's.

    Raises:
        ConfigError: prometheus_client is not installed, or the address cannot be bound.
    """
    if not address:
        yield
        return
    if names == VLLM:
        groups = [vllm_names.renamed(group) for group in groups]
    groups = [*groups, Group(TRACING, lambda: tracer.counts, {"role": role})]
    async with MetricsEndpoint(address, groups) as endpoint:
        log.info("metrics at http://%s%s", endpoint.address, PATH)
        yield


class MetricsEndpoint:
    """`GET /metrics`, while the `async with` lasts, with bounds on connections, request size and time.

    `prometheus_client.start_http_server` has none of them: a thread for each connection, without a timeout,
    which would read the counts while the event loop changes them.

    Errors as for `serving`.

    Attributes:
        address: HOST:PORT where it listens.
    """

    def __init__(self, address: str, groups: Sequence[Group[Any]]) -> None:
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"--metrics-address {address}: prometheus_client is not installed ({error}): "
                'pip install "specwire[metrics]"'
            ) from error
        self.address = address
        self._groups = groups
        self._num_connections = 0

    async def __aenter__(self) -> MetricsEndpoint:
        host, port = split_address("metrics_address", self.address)
        try:
            self._server = await asyncio.start_server(
                self._connected, host.strip("[]"), port, limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            problem = error.strerror or error
            raise ConfigError(f"--metrics-address {self.address}: cannot be bound ({problem})") from None
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def text(self, *, openmetrics: bool = False) -> bytes:
        """All metrics in Prometheus' text format, or in OpenMetrics'."""
        from prometheus_client import CollectorRegistry, ProcessCollector

        families = [family for group in self._groups for family in group.families()]
        families += ProcessCollector(registry=CollectorRegistry()).collect()  # memory, CPU time, open files
        return await asyncio.to_thread(_format, families, openmetrics)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, or does not speak HTTP
        finally:
            self._num_connections -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != PATH.encode():
            return _response("404 Not Found", f"metrics are at {PATH}\n".encode())
        if method != b"GET":
            return _response("405 Method Not Allowed", b"GET only\n", "Allow: GET")
        openmetrics = _wants_openmetrics(head)
        kind = OPENMETRICS_CONTENT_TYPE if openmetrics else CONTENT_TYPE
        return _response("200 OK", await self.text(openmetrics=openmetrics), content_type=kind)


def _format(families: Iterable[Family], openmetrics: bool) -> bytes:
    from prometheus_client import generate_latest
    from prometheus_client.openmetrics import exposition as openmetrics_text

    snapshot: Any = SimpleNamespace(collect=lambda: families)  # all that they ask of a registry
    if openmetrics:
        # By default it would write vLLM's names, which have a colon, in another way where it has samples.
        as_it_is = openmetrics_text.ALLOWUTF8
        return openmetrics_text.generate_latest(snapshot, escaping=as_it_is)  # type: ignore[no-any-return, no-untyped-call]
    return generate_latest(snapshot)


def _wants_openmetrics(head: bytes) -> bool:
    """Whether `Accept` names OpenMetrics, as each scraper does that reads it, and does not rule it out."""
    lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
    accepted = b",".join(value for name, _, value in lines if name == b"accept")
    for each in accepted.replace(b" ", b"").split(b","):
        kind, *parameters = each.split(b";")
        if kind == b"application/openmetrics-text":
            return not any(re.fullmatch(rb"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


def _response(status: str, body: bytes, *headers: str, content_type: str = CONTENT_TYPE) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
