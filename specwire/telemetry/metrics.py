"""Metrics of a service for Prometheus: declared in tables, and served by an endpoint.

    a service's own counts ──▶ table of metrics ──▶ families ──▶ text of `GET /metrics`
    (plain numbers)            name, help, reader   on the event loop    on another thread

Nothing is counted twice: a metric is a name, a help text, and how to read it from counts that the service
keeps anyway. A scrape reads all of them at once on the event loop, so that they are consistent; formatting,
which takes longer, is left to a thread. Label values come from the code, never from a client.

Histograms keep exemplars: for each bucket, the latest value whose request was traced. They are served to a
scraper that asks for OpenMetrics; the older text format has no place for them.

Without an address nothing listens, and prometheus_client is not imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import re
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from specwire.config.fields import split_address
from specwire.errors import ConfigError
from specwire.telemetry import tracing

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_MAX_CONNECTIONS = 8
_MAX_HEAD_BYTES = 8192
_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)

Source = TypeVar("Source")


Exemplar = tuple[float, str, float]
"""A value, the id of its trace, and when it was counted, in seconds since the epoch."""


class HistogramData:
    """Counts of values by bucket.

    Args:
        bounds: ascending; a value counts for the first bound that it does not exceed.

    Attributes:
        exemplars: of each bucket, infinity's last, the latest value that had a trace.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.exemplars: list[Exemplar | None] = [None] * len(self.counts)

    def add(self, value: float, count: int = 1, trace_id: str = "") -> None:
        """Count one value, or several that are equal; `trace_id` makes it an exemplar."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.sum += value * count
        if trace_id:
            self.exemplars[bucket] = (value, trace_id, time.time())

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound, infinity last, and the number of values that do not exceed it."""
        return list(zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True))


Labelled = Mapping[tuple[str, ...], float | HistogramData]
"""Numbers or histograms by the values of a metric's labels, in their order."""


class MetricKind(enum.StrEnum):
    """How Prometheus treats a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric(Generic[Source]):
    """One metric of a service.

    Attributes:
        name: as it is scraped; a counter's ends in `_total`, after the unit.
        help: one sentence.
        read: its value; a `HistogramData` if it is a histogram; of either, a mapping if it has labels.
        labels: names of its labels.
    """

    kind: MetricKind
    name: str
    help: str
    read: Callable[[Source], float | HistogramData | Labelled]
    labels: tuple[str, ...] = ()

    def family(self, source: Source, fixed: Mapping[str, str]) -> Family:
        """Its current samples, each with the `fixed` labels."""
        from prometheus_client.metrics_core import Metric as Family

        family = Family(self.name.removesuffix("_total"), self.help, self.kind)
        reading = self.read(source)
        by_labels = reading if isinstance(reading, Mapping) else {(): reading}
        for values, each in by_labels.items():
            labels = {**fixed, **dict(zip(self.labels, values, strict=True))}
            if isinstance(each, HistogramData):
                _add_histogram(family, self.name, labels, each)
            else:
                family.add_sample(self.name, labels, each)
        return family


def _add_histogram(family: Family, name: str, labels: Mapping[str, str], data: HistogramData) -> None:
    from prometheus_client import samples
    from prometheus_client.utils import floatToGoString

    for (bound, count), kept in zip(data.cumulative, data.exemplars, strict=True):
        exemplar = samples.Exemplar({"trace_id": kept[1]}, kept[0], kept[2]) if kept else None
        le = floatToGoString(bound)  # type: ignore[no-untyped-call]
        family.add_sample(f"{name}_bucket", {**labels, "le": le}, count, exemplar=exemplar)
    family.add_sample(f"{name}_count", {**labels}, sum(data.counts))
    family.add_sample(f"{name}_sum", {**labels}, data.sum)


class Group(Generic[Source]):
    """A table of metrics and the source of their values.

    Args:
        take: returns the source; called once for each scrape, on the event loop.
        fixed: labels of all samples.
    """

    def __init__(
        self,
        table: Sequence[Metric[Source]],
        take: Callable[[], Source],
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._table = table
        self._take = take
        self._fixed = fixed or {}

    def families(self) -> list[Family]:
        """The current samples of all metrics."""
        source = self._take()
        return [metric.family(source, self._fixed) for metric in self._table]


TRACING: tuple[Metric[tracing.SpanCounts], ...] = (
    Metric(
        MetricKind.COUNTER,
        "specwire_spans_dropped_total",
        "Spans that no collector will see: the queue was full, or their export failed.",
        lambda counts: {("queue_full",): counts.num_dropped, ("export_failed",): counts.num_failed},
        ("reason",),
    ),
    Metric(
        MetricKind.COUNTER,
        "specwire_spans_exported_total",
        "Spans that a collector has taken.",
        lambda counts: counts.num_exported,
    ),
    Metric(
        MetricKind.COUNTER,
        "specwire_generations_untraced_total",
        "Generations that were not traced, in none of the services, because the queue was full.",
        lambda counts: counts.num_untraced,
    ),
    Metric(
        MetricKind.GAUGE,
        "specwire_spans_queued",
        "Spans that wait for their export or are in it.",
        lambda counts: counts.num_queued,
    ),
)
"""Of every service, traced or not."""


@contextlib.asynccontextmanager
async def serving(
    address: str, groups: Sequence[Group[Any]], tracer: tracing.Tracing, role: str
) -> AsyncIterator[None]:
    """Serve these metrics, those of tracing and those of the process at `http://HOST:PORT/metrics` meanwhile.

    Args:
        address: HOST:PORT; empty serves nothing.
        role: of the service; a label of the metrics that all services have.

    Raises:
        ConfigError: prometheus_client is not installed, or the address cannot be bound.
    """
    if not address:
        yield
        return
    spans = Group(TRACING, lambda: tracer.counts, {"role": role})
    async with MetricsEndpoint(address, [*groups, spans]) as endpoint:
        log.info("metrics at http://%s%s", endpoint.address, PATH)
        yield


class MetricsEndpoint:
    """`GET /metrics`, while the `async with` lasts, with bounds on connections, request size and time.

    `prometheus_client.start_http_server` has none of them: a thread for each connection, without a timeout,
    which would read the counts while the event loop changes them.

    Attributes:
        address: HOST:PORT where it listens.
    """

    def __init__(self, address: str, groups: Sequence[Group[Any]]) -> None:
        """Raises:
        ConfigError: prometheus_client is not installed.
        """
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector
        except ImportError as error:
            raise ConfigError(
                f"--metrics-address {address}: prometheus_client is not installed ({error}): "
                'pip install "specwire[metrics]"'
            ) from error
        self.address = address
        self._groups = groups
        self._process = ProcessCollector(registry=CollectorRegistry())
        self._num_connections = 0

    async def __aenter__(self) -> MetricsEndpoint:
        """Raises:
        ConfigError: the address cannot be bound.
        """
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
        families = [family for group in self._groups for family in group.families()]
        return await asyncio.to_thread(self._format, families, openmetrics)

    def _format(self, families: Iterable[Family], openmetrics: bool) -> bytes:
        from prometheus_client import generate_latest
        from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
        from prometheus_client.registry import Collector

        process = self._process

        class Snapshot(Collector):
            def collect(self) -> Iterator[Family]:
                yield from families
                yield from process.collect()

        if openmetrics:
            return generate_openmetrics(Snapshot())  # type: ignore[no-any-return, no-untyped-call]
        return generate_latest(Snapshot())

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
        if _wants_openmetrics(head):
            body = await self.text(openmetrics=True)
            return _response("200 OK", body, content_type=OPENMETRICS_CONTENT_TYPE)
        return _response("200 OK", await self.text())


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
