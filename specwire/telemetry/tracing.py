"""Traces of generations, through OpenTelemetry; without it configured, at no cost.

`docs/jaeger.md` has the spans of a generation, of all three services, with their attributes, and the `OTEL_*`
variables, which turn tracing on and set it. While it is off, nothing of OpenTelemetry is imported.

A collector that is slow, gone or silent costs memory for `OTEL_BSP_MAX_QUEUE_SIZE` spans (2048) and next to
nothing else: a span that would begin while the queue is full is not created, nor are its descendants in any
of the services, and that is counted (`Tracing.counts`). While exports fail the queue is full with 64.

Parents are always explicit, as W3C `traceparent` strings: one event loop serves many streams, and the
engine knows its times only afterwards, so there is no ambient current span.
"""

from __future__ import annotations

import asyncio
import enum
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from specwire.errors import ConfigError, InvalidRequestError, SpecwireError
from specwire.telemetry import environment, logs
from specwire.telemetry.propagation import NO_CONTEXT, W3C, Propagators, TraceContext

Attributes = Mapping[str, str | bool | int | float | Sequence[str] | None]


@dataclass(slots=True)
class SpanCounts:
    """What became of a process's spans; all 0 without tracing.

    Attributes:
        num_accepted: queued, to be exported.
        num_taken: whose export has begun.
        num_exported: accepted by a collector.
        num_failed: exported without success.
        num_dropped: not created or not queued because the queue was full; their descendants do not count.
        num_untraced: generations that were not traced because the queue was full when they began.
    """

    num_accepted: int = 0
    num_taken: int = 0
    num_exported: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    num_untraced: int = 0

    @property
    def num_queued(self) -> int:
        """Waiting for their export, or being exported."""
        return self.num_accepted - self.num_exported - self.num_failed


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

    _is_recorded = False

    def __init__(self, context: TraceContext = NO_CONTEXT) -> None:
        self.context = context

    @property
    def traceparent(self) -> str:
        """Its W3C name, `00-<trace>-<span>-<flags>`, for its children; without tracing that of its parent."""
        return self.context.traceparent

    @property
    def trace_id(self) -> str:
        """Of its trace, for logs: 32 hex digits; empty if it is not recorded."""
        return self.traceparent[3:35] if self._is_recorded else ""

    def set(self, attributes: Attributes) -> None:
        """Add attributes; those that are None are left out."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add something that happens now; attributes as for `set`."""

    def link(self, traceparent: str) -> None:
        """It goes back to a span without being its child; a malformed or empty one is dropped."""

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
            self.fail(error_type(error), described(error))
        self.end()


def error_type(error: BaseException) -> str:
    """What an exception is on a span: the name of its gRPC status, or its class."""
    if isinstance(error, SpecwireError):
        return error.status
    return CANCELLED if isinstance(error, _CANCELLATIONS) else type(error).__name__


def described(error: BaseException) -> str:
    """What a span says of an error: of a refusal which field and why, as its message has a client's text."""
    if not isinstance(error, InvalidRequestError):
        return str(error)
    return "{field}={value}: {reason}".format(**logs.refused(error))


class Tracing:
    """Where a process's spans go: here, nowhere. All methods may be called from any thread, and none blocks.

    Attributes:
        enabled: False where all of this does nothing; for callers that would have to work for an attribute.
        propagators: reads and writes the headers of calls, with tracing or without.
        counts: what became of the spans so far.
    """

    enabled = False

    def __init__(self, propagators: Propagators = W3C) -> None:
        self.propagators = propagators
        self.counts = SpanCounts()

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: str | TraceContext | None = None,
        attributes: Attributes | None = None,
        start_ns: int | None = None,
    ) -> Span:
        """Begin a span.

        Args:
            parent: traceparent or context of its parent; without one, or with a malformed one, it begins a
                trace.
            start_ns: when it began, in nanoseconds since the epoch; None for now.
        """
        if not parent:
            return NO_SPAN
        return Span(parent if isinstance(parent, TraceContext) else TraceContext(parent))

    def shutdown(self, timeout_ms: int = 1000) -> None:
        """Export what is left and stop; what is not exported by the timeout is lost. Also happens at exit."""


NO_SPAN = Span()
"""A span that is not recorded, and whose caller does not trace either."""


def configure(service_name: str) -> Tracing:
    """Set up tracing for this process as the `OTEL_*` variables say (`docs/jaeger.md`).

    Args:
        service_name: `service.name`, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` give one.

    Raises:
        ConfigError: the opentelemetry packages are not installed, or a variable has an invalid value.
    """
    propagators = Propagators.from_environment()
    if not environment.is_tracing_requested():
        return Tracing(propagators)
    environment.check()
    try:
        exporter = environment.exporter()
        from specwire.telemetry.recording import Exporting
    except ImportError as error:
        raise ConfigError(
            "an OTEL_* variable enables tracing, and OpenTelemetry is not installed "
            f'({error}): pip install "specwire[tracing]", or set OTEL_SDK_DISABLED=true'
        ) from error
    return Exporting(service_name, exporter, propagators)


def of_application() -> Tracing:
    """Spans by the tracer provider of the application that this is a library of, beneath its current span.

    Without OpenTelemetry in the application, nothing of it is imported, and no span is recorded.
    """
    if "opentelemetry.trace" not in sys.modules or "opentelemetry.sdk.trace" not in sys.modules:
        return _NO_TRACING
    from specwire.telemetry.recording import Ambient

    return Ambient()


_NO_TRACING = Tracing()
