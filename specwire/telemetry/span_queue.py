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

from specwire.telemetry.environment import BatchLimits

_NUM_PROBES = 64


class SpanQueue(BatchSpanProcessor):
    """Keeps at most `limits.max_queued` ended spans, not counting the batch that is being exported.

    When it is full, new spans are dropped rather than old ones, so that older traces stay complete. While
    exports fail it keeps only a few as probes: creating and sending spans in vain would cost more than
    exporting them.

    Attributes:
        exports: what became of them; its `shutdown` aborts an export that hangs.
        num_dropped: spans that found it full.
    """

    def __init__(self, exporter: SpanExporter, limits: BatchLimits) -> None:
        self.exports = _Counting(exporter)
        super().__init__(self.exports, limits.max_queued, limits.delay_ms, limits.max_batch)
        self._max_queued = limits.max_queued
        self._num_probes = min(_NUM_PROBES, limits.max_queued)
        self._accepting = threading.Lock()
        self._num_accepted = 0
        self.num_dropped = 0

    @property
    def num_queued(self) -> int:
        """Spans waiting for their export, or being exported."""
        return self._num_accepted - self.exports.num_exported - self.exports.num_failed

    @property
    def is_full(self) -> bool:
        """Whether a span that ends now is dropped."""
        limit = self._num_probes if self.exports.fails else self._max_queued
        return self._num_accepted - self.exports.num_taken >= limit

    def drop(self) -> None:
        """Count a span that was not created."""
        with self._accepting:
            self.num_dropped += 1

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`; does not block."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._accepting:  # what is accepted must fit into the SDK's queue, which drops without counting
            if self.is_full:
                self.num_dropped += 1
            else:
                self._num_accepted += 1
                super().on_end(span)


class _Counting(SpanExporter):
    """Counts the spans that the SDK exports, by result; `fails` is whether the last export failed."""

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
