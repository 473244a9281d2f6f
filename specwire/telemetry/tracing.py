"""Traces of generations, through OpenTelemetry; without it configured, at no cost.

One trace a generation, over all three services (spans, who makes them, and their attributes):

    generate             coordinator; gen_ai.operation.name, gen_ai.request.model, gen_ai.request.max_tokens,
    │                    gen_ai.request.temperature, gen_ai.request.top_k, gen_ai.request.top_p,
    │                    gen_ai.request.seed, gen_ai.response.finish_reasons, gen_ai.usage.input_tokens,
    │                    gen_ai.usage.output_tokens, gen_ai.server.time_to_first_token (seconds),
    │                    specwire.rule, specwire.num_rounds, specwire.num_draft_tokens,
    │                    specwire.num_accepted_tokens, specwire.num_prepared, specwire.num_cached_tokens,
    │                    specwire.draft.available
    └ round              coordinator; specwire.round (from 0), specwire.base_len, specwire.num_draft_tokens,
      │                  specwire.num_accepted_tokens, specwire.draft.prepared
      ├ draft            coordinator; specwire.base_len, specwire.num_draft_tokens,
      │ │                specwire.request_bytes, specwire.response_bytes, specwire.num_cached_tokens
      │ ├ draft.prepare  draft service; specwire.base_len, specwire.num_outcomes; of the round itself, without
      │ │                a draft call, where its proposal had been prepared
      │ ├ draft.queue    draft service; specwire.base_len
      │ └ draft.forward  draft service; specwire.base_len, specwire.batch_size
      ├ verify           coordinator; specwire.base_len, specwire.num_draft_tokens,
      │ │                specwire.request_bytes, specwire.response_bytes, specwire.num_cached_tokens
      │ ├ verify.queue   verify service; specwire.base_len
      │ └ verify.forward verify service; specwire.base_len, specwire.batch_size
      └ accept           coordinator

`gen_ai.*` and `error.type` (on a span that an exception ended) are OpenTelemetry's conventions. Lengths
are in tokens, sizes in bytes, `batch_size` in sequences, of the last forward pass. `draft.available` is false
where the draft could not be used for a part of the generation; `draft.prepared` is true where its
proposal was ready before it was requested. `num_cached_tokens` are those that the service found in its cache
instead of computing them.

Tracing is on when `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
`OTEL_TRACES_EXPORTER=otlp` is set, and off again with `OTEL_TRACES_EXPORTER=none` or
`OTEL_SDK_DISABLED=true`. While it is off, nothing of OpenTelemetry is imported. Protocol, headers,
sampling, batch sizes and resource are set by the usual `OTEL_*` variables.

A collector that is slow, gone or silent costs memory for `OTEL_BSP_MAX_QUEUE_SIZE` spans (2048) and next to
nothing else: a span that would begin while the queue is full is not created, nor are its descendants in any
of the services, and that is counted (`Tracing.counts`). While exports fail the queue is full with 64.

Parents are always explicit, as W3C `traceparent` strings: one event loop serves many streams, and the
engine knows its times only afterwards, so there is no ambient current span.
"""

from __future__ import annotations

import asyncio
import atexit
import enum
import functools
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from specwire.errors import ConfigError, SpecwireError
from specwire.telemetry.propagation import (
    NO_CONTEXT,
    W3C,
    Propagators,
    TraceContext,
    checked_traceparent,
)
from specwire.telemetry.semantics import *  # noqa: F403 - until the coordinator imports `semantics`
from specwire.telemetry.semantics import ERROR_TYPE, GENERATE

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OpenTelemetrySpan

    from specwire.telemetry.span_queue import SpanQueue

Attributes = Mapping[str, str | bool | int | float | Sequence[str] | None]

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORT_TIMEOUT_S = 2.0
_MAX_QUEUED = 2048
_LOG_INTERVAL_S = 60.0
_NUM_CONTEXTS = 512
_UNSAMPLED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """What became of a process's spans.

    Attributes:
        num_queued: waiting for their export, or being exported.
        num_exported: accepted by a collector.
        num_dropped: not created or not queued because the queue was full; their descendants do not count.
        num_failed: exported without success.
        num_untraced: generations that were not traced because the queue was full when they began.
    """

    num_queued: int = 0
    num_exported: int = 0
    num_dropped: int = 0
    num_failed: int = 0
    num_untraced: int = 0


class SpanKind(enum.Enum):
    """What a span is to its callers; service graphs and span metrics join CLIENT to SERVER."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


CANCELLED: Final = "CANCELLED"
"""`error.type` of what its caller gave up, which is no error of the system."""
_CANCELLATIONS = (asyncio.CancelledError, GeneratorExit)


class Span:
    """A part of a generation, from `with` to its end. This one is not recorded; `_RecordedSpan` is.

    An exception that ends it marks it as failed, unless `fail` did before.

    Attributes:
        context: what to send with calls that belong to it.
    """

    def __init__(self, context: TraceContext = NO_CONTEXT) -> None:
        self.context = context

    @property
    def traceparent(self) -> str:
        """Its W3C name, `00-<trace>-<span>-<flags>`, for its children; without tracing that of its parent."""
        return self.context.traceparent

    @property
    def trace_id(self) -> str:
        """Of its trace, for logs: 32 hex digits; empty if it is not recorded."""
        return ""

    def set(self, attributes: Attributes) -> None:
        """Add attributes; those that are None are left out."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add something that happens now; attributes as for `set`."""

    def fail(self, kind: str, description: str = "") -> None:
        """Mark it as failed, without an exception; the first call counts.

        Args:
            kind: its `error.type`: the name of a gRPC status where there is one. `CANCELLED` is not an error:
                it leaves an event `cancelled`, and the status as it is.
        """

    def end(self, end_ns: int | None = None) -> None:
        """End it, now or at a time since the epoch; for a span that no `with` ends. The first call counts."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it; an exception marks it as failed."""
        if error is not None:
            self.fail(error_type(error), str(error))
        self.end()


def error_type(error: BaseException) -> str:
    """What an exception is on a span: the name of its gRPC status, or its class."""
    if isinstance(error, SpecwireError):
        return error.status
    return CANCELLED if isinstance(error, _CANCELLATIONS) else type(error).__name__


class Tracing:
    """Where a process's spans go: here, nowhere. All methods may be called from any thread, and none blocks.

    Attributes:
        enabled: False where all of this does nothing; for callers that would have to work for an attribute.
        propagators: reads and writes the headers of calls, with tracing or without.
    """

    enabled = False

    def __init__(self, propagators: Propagators = W3C) -> None:
        self.propagators = propagators

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: str | TraceContext | None = None,
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        start_ns: int | None = None,
    ) -> Span:
        """Begin a span.

        Args:
            parent: traceparent or context of its parent; without one, or with a malformed one, it begins a
                trace.
            links: traceparents of spans that it goes back to without being their child; malformed ones are
                dropped.
            start_ns: when it began, in nanoseconds since the epoch; None for now.
        """
        return _passed_on(parent)

    def record(
        self,
        name: str,
        *,
        start_ns: int,
        end_ns: int,
        parent: str | TraceContext,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        error: str = "",
    ) -> None:
        """Add a span that has ended already; times in nanoseconds since the epoch, as `time.time_ns()`.

        Without a valid parent it is not recorded: the caller is not tracing.

        Args:
            error: how it failed, as for `Span.fail`; empty if it did not.
        """

    @property
    def counts(self) -> SpanCounts:
        """What became of the spans so far; all 0 without tracing."""
        return SpanCounts()

    def shutdown(self, timeout_ms: int = 1000) -> None:
        """Export what is left and stop; what is not exported by the timeout is lost. Also happens at exit."""


_NOT_RECORDED = Span()


def _passed_on(parent: str | TraceContext | None) -> Span:
    """A span that is not recorded: what it sends on is what it was sent."""
    if not parent:
        return _NOT_RECORDED
    return Span(parent if isinstance(parent, TraceContext) else TraceContext(parent))


def configure(service_name: str) -> Tracing:
    """Set up tracing for this process as the `OTEL_*` variables say; see the top of this module.

    Args:
        service_name: `service.name`, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` give one.

    Raises:
        ConfigError: the opentelemetry packages are not installed, or a variable names an unknown exporter or
            protocol.
    """
    propagators = Propagators.from_environment()
    if not _is_requested():
        return Tracing(propagators)
    try:
        exporter = _make_exporter()
        return _OpenTelemetry(service_name, exporter, propagators)
    except ImportError as error:
        raise ConfigError(
            "an OTEL_* variable enables tracing, and OpenTelemetry is not installed "
            f'({error}): pip install "specwire[tracing]", or set OTEL_SDK_DISABLED=true'
        ) from error


def _is_requested() -> bool:
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return False
    exporter = _variable("OTEL_TRACES_EXPORTER")
    if exporter not in ("", "none", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER={exporter}: must be otlp or none")
    return exporter == "otlp" or (exporter == "" and any(map(_variable, _ENDPOINT_VARIABLES)))


def _variable(*names: str) -> str:
    """The first of these environment variables that is not empty; else empty."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def _make_exporter() -> SpanExporter:
    timeout_variables = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    timeout_s = None if _variable(*timeout_variables) else _EXPORT_TIMEOUT_S
    protocol = _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol in ("", "grpc"):
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        return over_grpc.OTLPSpanExporter(timeout=timeout_s)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter(timeout=timeout_s)
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: must be grpc or http/protobuf")


def _make_queue(exporter: SpanExporter) -> SpanQueue:
    from specwire.telemetry.span_queue import SpanQueue

    text = _variable("OTEL_BSP_MAX_QUEUE_SIZE") or str(_MAX_QUEUED)
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ConfigError(f"OTEL_BSP_MAX_QUEUE_SIZE={text}: must be a whole number over 0")
    return SpanQueue(exporter, int(text))


class _OpenTelemetry(Tracing):
    """Spans through the OpenTelemetry SDK: a bounded queue, and a thread that exports it in batches."""

    enabled = True

    def __init__(self, service_name: str, exporter: SpanExporter, propagators: Propagators) -> None:
        super().__init__(propagators)
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased
        from opentelemetry.trace import SpanKind as OpenTelemetryKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._log = _OccasionalLog()
        from_environment = OTELResourceDetector().detect().attributes
        resource = Resource.create({SERVICE_NAME: service_name, **from_environment})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._queue = _make_queue(exporter)
        provider.add_span_processor(self._queue)
        self._provider = provider
        # Other samplers may record children of a span that is not recorded.
        self._sheds = isinstance(provider.sampler, ParentBased)
        self._num_untraced = 0
        self._tracer = provider.get_tracer("specwire")
        self._no_context = Context()
        self._kinds = {kind: OpenTelemetryKind[kind.value] for kind in SpanKind}
        self._propagator = TraceContextTextMapPropagator()
        self._context = functools.lru_cache(_NUM_CONTEXTS)(self._parsed)  # siblings have the same parent
        # The SDK's shutdown takes up to 30 s, and no thread can be started at exit: this one waits for it.
        self._stop, self._stopped = threading.Event(), threading.Event()
        threading.Thread(target=self._stop_provider, name="specwire-tracing-stop", daemon=True).start()
        atexit.register(self.shutdown)

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: str | TraceContext | None = None,
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        start_ns: int | None = None,
    ) -> Span:
        context = _as_context(parent)
        if self._sheds:
            if _UNSAMPLED.fullmatch(context.traceparent):
                return Span(context)
            if self._queue.is_full:
                return self._drop(name, context)
        span = self._tracer.start_span(
            name,
            self._context(context),
            self._kinds[kind],
            _present(attributes),
            self._linked(links),
            start_ns,
        )
        return _RecordedSpan(span, context) if span.is_recording() else Span(_context_of(span, context))

    def record(
        self,
        name: str,
        *,
        start_ns: int,
        end_ns: int,
        parent: str | TraceContext,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[str] = (),
        error: str = "",
    ) -> None:
        context = _as_context(parent)
        if not checked_traceparent(context.traceparent):
            return
        if self._sheds and self._queue.is_full and not _UNSAMPLED.fullmatch(context.traceparent):
            self._queue.drop()
            return
        span = self.span(
            name, kind=kind, parent=parent, attributes=attributes, links=links, start_ns=start_ns
        )
        if error:
            span.fail(error)
        span.end(end_ns)

    def _linked(self, links: Sequence[str]) -> list[Any]:
        from opentelemetry.trace import Link, get_current_span

        contexts = [self._context(TraceContext(link)) for link in links if checked_traceparent(link)]
        return [Link(get_current_span(context).get_span_context()) for context in contexts]

    def _drop(self, name: str, context: TraceContext) -> Span:
        """Count a span that is not created; its stand-in is unsampled, and so are its children."""
        if name == GENERATE:
            self._num_untraced += 1
        else:
            self._queue.drop()
        traceparent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
        return Span(TraceContext(traceparent, baggage=context.baggage))

    @property
    def counts(self) -> SpanCounts:
        queue = self._queue
        return SpanCounts(
            num_queued=queue.num_queued,
            num_exported=queue.num_exported,
            num_dropped=queue.num_dropped,
            num_failed=queue.num_failed,
            num_untraced=self._num_untraced,
        )

    def shutdown(self, timeout_ms: int = 1000) -> None:
        atexit.unregister(self.shutdown)
        self._stop.set()
        if not self._stopped.wait(timeout_ms / 1000):
            self._log.mute()
            self._queue.abort()

    def _stop_provider(self) -> None:
        self._stop.wait()
        self._provider.shutdown()
        self._stopped.set()

    def _parsed(self, parent: TraceContext) -> Context:
        """The SDK's context of a parent; `_no_context` without one. Never the ambient context."""
        if not parent.traceparent:
            return self._no_context
        headers = dict(W3C.headers(parent))
        return self._propagator.extract(headers, context=self._no_context)


def _as_context(parent: str | TraceContext | None) -> TraceContext:
    return parent if isinstance(parent, TraceContext) else TraceContext(parent or "")


def _context_of(span: OpenTelemetrySpan, parent: TraceContext) -> TraceContext:
    context = span.get_span_context()
    flags = int(context.trace_flags)
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
    return TraceContext(traceparent, parent.tracestate if context.trace_state else "", parent.baggage)


class _RecordedSpan(Span):
    def __init__(self, span: OpenTelemetrySpan, parent: TraceContext) -> None:
        super().__init__(_context_of(span, parent))
        self._span = span
        self._failed = False

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_present(attributes))

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, _present(attributes))

    def fail(self, kind: str, description: str = "") -> None:
        if self._failed:
            return
        self._failed = True
        self._span.set_attribute(ERROR_TYPE, kind)
        if kind == CANCELLED:
            self._span.add_event("cancelled")
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, description))

    def end(self, end_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(end_ns)


def _present(attributes: Attributes | None) -> dict[str, str | bool | int | float | Sequence[str]]:
    return {name: value for name, value in (attributes or {}).items() if value is not None}


class _OccasionalLog(logging.Handler):
    """Takes over the SDK's warnings, many with a dead collector, and passes on one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next = 0.0
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        earlier = [handler for handler in logger.handlers if not isinstance(handler, _OccasionalLog)]
        logger.handlers = [*earlier, self]

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _LOG_INTERVAL_S
            _logger.warning("traces may be lost: %s", record.getMessage())

    def mute(self) -> None:
        """Pass on nothing more: an export that is aborted at shutdown is no news."""
        self._next = float("inf")
