"""A bounded queue of spans over the SDK's own, which drops without counting.

    ended spans ──▶ room? ──▶ BatchSpanProcessor ──▶ batches, on its thread ──▶ exporter
                      └ no: dropped, counted         exported or failed: counted ┘

Imported only where tracing is on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from specwire.telemetry.tracing import SpanCounts

_NUM_PROBES = 64


class SpanQueue(BatchSpanProcessor):
    """Keeps at most `max_queued` ended spans, not counting the batch that is being exported.

    When it is full, new spans are dropped rather than old ones, so that older traces stay complete. While
    exports fail it keeps only a few as probes: creating and sending spans in vain would cost more than
    exporting them.

    Attributes:
        counts: what became of them.
        exports: their way to a collector; its `shutdown` aborts an export that hangs.
    """

    def __init__(self, exporter: SpanExporter, max_queued: int, delay_ms: int, max_batch: int) -> None:
        self.counts = SpanCounts()
        self.exports = _Counting(exporter, self.counts)
        super().__init__(self.exports, max_queued, delay_ms, max_batch)
        self._max_queued = max_queued
        self._num_probes = min(_NUM_PROBES, max_queued)
        self._accepting = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether a span that ends now is dropped."""
        limit = self._num_probes if self.exports.fails else self._max_queued
        return self.counts.num_accepted - self.counts.num_taken >= limit

    def drop(self) -> None:
        """Count a span that was not created."""
        with self._accepting:
            self.counts.num_dropped += 1

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`; does not block."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._accepting:  # what is accepted must fit into the SDK's queue, which drops without counting
            if self.is_full:
                self.counts.num_dropped += 1
            else:
                self.counts.num_accepted += 1
                super().on_end(span)


class _Counting(SpanExporter):
    """Counts the spans that the SDK exports, by result; `fails` is whether the last export failed."""

    def __init__(self, exporter: SpanExporter, counts: SpanCounts) -> None:
        self._exporter, self._counts = exporter, counts
        self.fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._counts.num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.fails = result is not SpanExportResult.SUCCESS
            if self.fails:
                self._counts.num_failed += len(spans)
            else:
                self._counts.num_exported += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
