"""Spans through OpenTelemetry: of a process that exports them, and of an application that traces itself.

Imported only where one of them is on.
"""

from __future__ import annotations

import atexit
import functools
import logging
import random
import re
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specwire import __version__
from specwire.telemetry import environment
from specwire.telemetry.propagation import W3C, Propagators, TraceContext
from specwire.telemetry.semantics import ERROR_TYPE, GENERATE
from specwire.telemetry.span_queue import SpanQueue
from specwire.telemetry.tracing import CANCELLED, Attributes, Span, SpanKind, Tracing

_LOG_INTERVAL_S = 60.0
_SWITCH_S = 0.0005
"""Threads take turns after this time: by default the thread that encodes a batch of spans holds up the event
loop for 5 ms at a time. Tokens/s over no tracing 0.949 with it, 0.935 without (medians of seven turns each,
0.85 to 0.98).
"""
_NUM_CONTEXTS = 512
_UNSAMPLED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][02468ace]")
"""The last bit says that it is sampled; the SDK sets others, such as that for random trace ids."""
_KINDS = {kind: trace.SpanKind[kind.value] for kind in SpanKind}
_MAX_EVENTS = 128
_UNSET = trace.Status(trace.StatusCode.UNSET)
Attribute = str | bool | int | float | Sequence[str]
_logger = logging.getLogger(__name__)


class _Resource(Resource):
    """One whose hash is computed once: the exporter takes that of every span, which is JSON of all of it, and
    a fifth of what encoding a span takes."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def _resource(service_name: str) -> Resource:
    """Of this process; the environment's attributes count before ours."""
    ours = {
        "service.name": service_name,
        "service.version": __version__,
        "service.instance.id": str(uuid.uuid4()),
        "host.name": socket.gethostname(),
    }
    whole = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    return _Resource(whole.attributes, whole.schema_url)


class _OpenTelemetry(Tracing):
    """Spans by a tracer of OpenTelemetry."""

    enabled = True

    def __init__(self, tracer: trace.Tracer, propagators: Propagators) -> None:
        super().__init__(propagators)
        self._tracer = tracer

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: str | TraceContext | None = None,
        attributes: Attributes | None = None,
        start_ns: int | None = None,
    ) -> Span:
        context = _as_context(parent)
        span = self._tracer.start_span(
            name, self._parent(context), _KINDS[kind], _present(attributes), start_time=start_ns
        )
        own = self._context_of(span, context)
        return _RecordedSpan(span, own) if span.is_recording() else Span(own)

    def _parent(self, context: TraceContext) -> Context | None:
        """What the tracer begins a span in. Never the ambient context, but where that is asked for."""
        return _parsed(context)

    def _context_of(self, span: trace.Span, parent: TraceContext) -> TraceContext:
        """What the span sends with its calls."""
        own = span.get_span_context()
        traceparent = f"00-{own.trace_id:032x}-{own.span_id:016x}-{int(own.trace_flags):02x}"
        return TraceContext(traceparent, parent.tracestate if own.trace_state else "", parent.baggage)


class Ambient(_OpenTelemetry):
    """Spans of an application that uses OpenTelemetry itself, beneath its current span, with its baggage."""

    def __init__(self) -> None:
        super().__init__(trace.get_tracer("specwire", __version__), W3C)

    def _parent(self, context: TraceContext) -> Context | None:
        return _parsed(context) if context.traceparent else None

    def _context_of(self, span: trace.Span, parent: TraceContext) -> TraceContext:
        if parent.traceparent:
            return super()._context_of(span, parent)
        headers: dict[str, str] = {}
        propagate.inject(headers, trace.set_span_in_context(span))
        return W3C.read(headers.items())


class Exporting(_OpenTelemetry):
    """Spans of this process: a bounded queue, and a thread that exports it in batches."""

    def __init__(self, service_name: str, exporter: SpanExporter, propagators: Propagators) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._log = _OccasionalLog()
        provider = TracerProvider(resource=_resource(service_name), shutdown_on_exit=False)
        self._queue = SpanQueue(exporter, *environment.batch_limits())
        provider.add_span_processor(self._queue)
        self._provider = provider
        # Other samplers may record children of a span that is not recorded.
        self._sheds = isinstance(provider.sampler, ParentBased)
        # With limits of its own a span is the SDK's, which applies them.
        self._is_quick = self._sheds and not environment.has_span_limits()
        self._resource = provider.resource
        self._scope = InstrumentationScope("specwire", __version__)
        super().__init__(provider.get_tracer("specwire", __version__), propagators)
        self.counts = self._queue.counts
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
        start_ns: int | None = None,
    ) -> Span:
        if self._sheds:
            context = _as_context(parent)
            if _UNSAMPLED.fullmatch(context.traceparent):
                return Span(context)
            if self._queue.is_full:
                return self._drop(name, context)
            above = _span_context(context) if self._is_quick else None
            if above is not None:
                ours = _SampledSpan(self._export, name, kind, above, context, start_ns or time.time_ns())
                ours.set(attributes or {})
                return ours
        return super().span(name, kind=kind, parent=parent, attributes=attributes, start_ns=start_ns)

    def _export(self, span: _SampledSpan, end_ns: int) -> None:
        self._queue.on_end(
            ReadableSpan(
                name=span.name,
                context=span.own,
                parent=span.above,
                resource=self._resource,
                attributes=span.attributes,
                events=span.events,
                links=span.links,
                kind=_KINDS[span.kind],
                status=span.status,
                start_time=span.start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def _drop(self, name: str, context: TraceContext) -> Span:
        """Count a span that is not created; its stand-in is unsampled, and so are its children."""
        if name == GENERATE:
            self.counts.num_untraced += 1
        else:
            self._queue.drop()
        traceparent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
        return Span(TraceContext(traceparent, baggage=context.baggage))

    def shutdown(self, timeout_ms: int = 1000) -> None:
        atexit.unregister(self.shutdown)
        self._stop.set()
        if not self._stopped.wait(timeout_ms / 1000):
            self._log.mute()
            self._queue.exports.shutdown()

    def _stop_provider(self) -> None:
        self._stop.wait()
        self._provider.shutdown()
        self._stopped.set()


def _as_context(parent: str | TraceContext | None) -> TraceContext:
    return parent if isinstance(parent, TraceContext) else TraceContext(parent or "")


@functools.lru_cache(_NUM_CONTEXTS)  # siblings have the same parent
def _parsed(parent: TraceContext) -> Context:
    """The SDK's context of a parent; an empty one without one."""
    return TraceContextTextMapPropagator().extract(dict(W3C.headers(parent)), context=Context())


@functools.lru_cache(_NUM_CONTEXTS)
def _span_context(parent: TraceContext) -> trace.SpanContext | None:
    """The SDK's name of a parent, or of the other end of a link; None if there is none."""
    context = trace.get_current_span(_parsed(parent)).get_span_context()
    return context if context.is_valid else None


class _RecordedSpan(Span):
    _is_recorded = True

    def __init__(self, span: trace.Span, context: TraceContext) -> None:
        super().__init__(context)
        self._span = span
        self._failed = False

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_present(attributes))

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        self._span.add_event(name, _present(attributes))

    def link(self, traceparent: str) -> None:
        context = _span_context(TraceContext(traceparent))
        if context is not None:
            self._span.add_link(context)

    def fail(self, kind: str, description: str = "") -> None:
        if self._failed or not self._span.is_recording():
            return
        self._failed = True
        self._span.set_attribute(ERROR_TYPE, kind)
        if kind == CANCELLED:
            self._span.add_event("cancelled")
            return
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, description))

    def end(self, end_ns: int | None = None) -> None:
        if self._span.is_recording():
            self._span.end(end_ns)


class _SampledSpan(Span):
    """A child of a sampled span, without what the SDK's own has for other cases: a fifth of its cost (24 to
    49 µs and 140 to 196 to begin, fill with twelve attributes and end one, nine turns on two slow cores).

    The SDK would ask a sampler whose answer is known, lock, copy and check each attribute, and keep three
    lists of bounded length.
    """

    _is_recorded = True

    def __init__(
        self,
        export: Callable[[_SampledSpan, int], None],
        name: str,
        kind: SpanKind,
        above: trace.SpanContext,
        parent: TraceContext,
        start_ns: int,
    ) -> None:
        span_id = random.getrandbits(64) or 1
        self._export = export
        self.name, self.kind, self.above, self.start_ns = name, kind, above, start_ns
        self.own = trace.SpanContext(above.trace_id, span_id, False, above.trace_flags, above.trace_state)
        self.context = TraceContext(
            f"00-{above.trace_id:032x}-{span_id:016x}-{above.trace_flags:02x}",
            parent.tracestate,
            parent.baggage,
        )
        self.attributes: dict[str, Attribute] = {}
        self.events: list[Event] = []
        self.links: Sequence[trace.Link] = ()
        self.status = _UNSET
        self._has_failed = self._has_ended = False

    def set(self, attributes: Attributes) -> None:
        for name, value in attributes.items():
            if value is not None:
                self.attributes[name] = value

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append(Event(name, _present(attributes)))

    def link(self, traceparent: str) -> None:
        context = _span_context(TraceContext(traceparent))
        if context is not None:
            self.links = [*self.links, trace.Link(context)]

    def fail(self, kind: str, description: str = "") -> None:
        if self._has_failed or self._has_ended:
            return
        self._has_failed = True
        self.attributes[ERROR_TYPE] = kind
        if kind == CANCELLED:
            self.event("cancelled")
        else:
            self.status = trace.Status(trace.StatusCode.ERROR, description)

    def end(self, end_ns: int | None = None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._export(self, end_ns or time.time_ns())


def _present(attributes: Attributes | None) -> dict[str, Attribute]:
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
