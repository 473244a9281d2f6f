"""Metrics of a service for Prometheus, declared in tables; `endpoint` serves them.

    a service's own counts ──▶ table of metrics ──▶ families ──▶ text of `GET /metrics`
    (plain numbers)            name, help, reader   on the event loop    on another thread

Nothing is counted twice: a metric is a name, a help text, and how to read it from counts that the service
keeps anyway. A scrape reads all of them at once on the event loop, so that they are consistent; formatting,
which takes longer, is left to a thread. Label values come from the code, never from a client.

Histograms keep exemplars: for each bucket, the latest value whose request was traced. They are served to a
scraper that asks for OpenMetrics; the older text format has no place for them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from specwire.telemetry import tracing

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

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
Reading = float | HistogramData | Labelled


@dataclass(frozen=True, slots=True)
class Metric(Generic[Source]):
    """One metric of a service; its class is how Prometheus treats it.

    Attributes:
        name: as it is scraped; a counter's ends in `_total`, after the unit.
        help: one sentence.
        read: its value; a `HistogramData` if it is a histogram; of either, a mapping if it has labels.
        labels: names of its labels.
    """

    kind: ClassVar[str]
    name: str
    help: str
    read: Callable[[Source], Reading]
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


class Counter(Metric[Source]):
    """A number that never goes down while the process runs."""

    kind = "counter"


class Gauge(Metric[Source]):
    """A number that goes up and down."""

    kind = "gauge"


class Histogram(Metric[Source]):
    """Counts of values by their size."""

    kind = "histogram"


def _add_histogram(family: Family, name: str, labels: Mapping[str, str], data: HistogramData) -> None:
    from prometheus_client import samples
    from prometheus_client.utils import floatToGoString

    for (bound, count), kept in zip(data.cumulative, data.exemplars, strict=True):
        exemplar = samples.Exemplar({"trace_id": kept[1]}, kept[0], kept[2]) if kept else None
        le = floatToGoString(bound)  # type: ignore[no-untyped-call]
        family.add_sample(f"{name}_bucket", {**labels, "le": le}, count, exemplar=exemplar)
    family.add_sample(f"{name}_count", {**labels}, sum(data.counts))
    family.add_sample(f"{name}_sum", {**labels}, data.sum)


@dataclass(frozen=True, slots=True)
class Group(Generic[Source]):
    """A table of metrics and the source of their values.

    Attributes:
        take: returns the source; called once for each scrape, on the event loop.
        fixed: labels of all samples.
    """

    table: Sequence[Metric[Source]]
    take: Callable[[], Source]
    fixed: Mapping[str, str] = field(default_factory=dict)

    def families(self) -> list[Family]:
        """The current samples of all metrics."""
        source = self.take()
        return [metric.family(source, self.fixed) for metric in self.table]


TRACING: tuple[Metric[tracing.SpanCounts], ...] = (
    Counter(
        "specwire_spans_dropped_total",
        "Spans that no collector will see: the queue was full, or their export failed.",
        lambda counts: {("queue_full",): counts.num_dropped, ("export_failed",): counts.num_failed},
        ("reason",),
    ),
    Counter(
        "specwire_spans_exported_total",
        "Spans that a collector has taken.",
        lambda counts: counts.num_exported,
    ),
    Counter(
        "specwire_generations_untraced_total",
        "Generations that were not traced, in none of the services, because the queue was full.",
        lambda counts: counts.num_untraced,
    ),
    Gauge(
        "specwire_spans_queued",
        "Spans that wait for their export or are in it.",
        lambda counts: counts.num_queued,
    ),
)
"""Of every service, traced or not."""
