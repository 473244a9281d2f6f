"""A bounded queue of spans on their way to a collector, in front of the SDK's own, which drops in silence.

    ended spans ──▶ room? ──▶ BatchSpanProcessor ──▶ batches, on its thread ──▶ exporter
                      └ no: dropped, and counted              taken or failed: counted ┘

Imported where tracing is on, and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

_NUM_PROBES = 64


class SpanQueue(SpanProcessor):
    """Keeps at most `max_queued` spans that have ended, the batch that is being exported not counted.

    Spans that come when it is full are dropped, not older ones: so traces that began before are whole. While
    the collector fails it keeps no more than what shows whether the collector is back: to make spans that
    nobody will see, and to try to send them, would cost more than where all is well.

    Attributes:
        num_dropped: came when it was full.
    """

    def __init__(self, exporter: SpanExporter, max_queued: int) -> None:
        self._exporter = _Counting(exporter)
        self._max_queued = max_queued
        self._num_probes = min(_NUM_PROBES, max_queued)
        batch_len = min(512, max_queued)
        self._batches = BatchSpanProcessor(self._exporter, max_queued, max_export_batch_size=batch_len)
        self._lock = threading.Lock()
        self._num_accepted = 0
        self.num_dropped = 0

    @property
    def num_queued(self) -> int:
        """Spans that wait for their export, or are in it."""
        return self._num_accepted - self.num_exported - self.num_failed

    @property
    def num_exported(self) -> int:
        """Spans that the collector has taken."""
        return self._exporter.num_exported

    @property
    def num_failed(self) -> int:
        """Spans that it has not taken."""
        return self._exporter.num_failed

    @property
    def is_full(self) -> bool:
        """Whether a span that ended now would be dropped."""
        limit = self._num_probes if self._exporter.fails else self._max_queued
        return self._num_accepted - self._exporter.num_taken >= limit

    def drop(self) -> None:
        """Count a span that was not even made."""
        with self._lock:
            self.num_dropped += 1

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See `SpanProcessor`: nothing happens before the end."""

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`; waits for nothing."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:  # what is accepted must fit the SDK's queue, which drops without a word
            if self.is_full:
                self.num_dropped += 1
            else:
                self._num_accepted += 1
                self._batches.on_end(span)

    def shutdown(self) -> None:
        """Export what is left and stop; may take long where the collector does not answer."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See `SpanProcessor`."""
        return self._batches.force_flush(timeout_millis)

    def abandon(self) -> None:
        """Break off the export that hangs."""
        self._exporter.shutdown()


class _Counting(SpanExporter):
    """Counts what the SDK hands to an exporter, and what came of it; `fails` is what came of it last."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_taken = self.num_exported = self.num_failed = 0
        self.fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.fails = result is not SpanExportResult.SUCCESS
            if not self.fails:
                self.num_exported += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
