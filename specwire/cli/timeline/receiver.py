"""A small OTLP collector over gRPC, which keeps spans in memory."""

from __future__ import annotations

import base64
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from specwire.cli.timeline.spans import RecordedSpan, SpanEvent, SpanLink, Value
from specwire.errors import ConfigError

MAX_BYTES = 64 << 20
_OPTIONS = (("grpc.so_reuseport", 0),)
_GRACE_S = 1.0


class Store:
    """The latest spans received; the oldest messages are dropped.

    Attributes:
        num_dropped: spans dropped.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Args:
        max_bytes: limit by size on the wire; the newest message is always kept.
        """
        self.num_dropped = 0
        self._changed = threading.Condition()
        self._messages: deque[tuple[int, list[RecordedSpan]]] = deque()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def spans(self) -> list[RecordedSpan]:
        """Spans kept, in order of arrival."""
        with self._changed:
            return self._spans()

    def wait(self, predicate: Callable[[list[RecordedSpan]], object], timeout_s: float | None = None) -> bool:
        """Wait until the predicate holds for the spans; False at the timeout."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: predicate(self._spans()), timeout_s))

    def keep(self, request: ExportTraceServiceRequest) -> None:
        """Add an export; may be called from any thread."""
        message = request.ByteSize(), spans_of(request)
        with self._changed:
            self._messages.append(message)
            self._num_bytes += message[0]
            while self._num_bytes > self._max_bytes and len(self._messages) > 1:
                num_bytes, spans = self._messages.popleft()
                self._num_bytes -= num_bytes
                self.num_dropped += len(spans)
            self._changed.notify_all()

    def _spans(self) -> list[RecordedSpan]:
        return [span for _, spans in self._messages for span in spans]


class Receiver(Store):
    """Receives while the `with` lasts.

    Attributes:
        endpoint: what to set OTEL_EXPORTER_OTLP_ENDPOINT to.
    """

    def __init__(self, address: str = "127.0.0.1:0", max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes)
        self._address = address

    def __enter__(self) -> Self:
        """Raises:
        ConfigError: the address cannot be bound.
        """
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2), options=_OPTIONS)
        add_TraceServiceServicer_to_server(_Servicer(self.keep), self._server)  # type: ignore[no-untyped-call]
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ConfigError(f"{self._address}: cannot be listened on ({error})") from None
        self.endpoint = f"http://{self._address.rpartition(':')[0]}:{port}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=_GRACE_S).wait()  # running exports are answered


class _Servicer(TraceServiceServicer):
    def __init__(self, keep: Callable[[ExportTraceServiceRequest], None]) -> None:
        self._keep = keep

    def Export(  # noqa: N802 - the protocol's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._keep(request)
        return ExportTraceServiceResponse()


def spans_of(request: ExportTraceServiceRequest) -> list[RecordedSpan]:
    """The spans of one message."""
    return [
        RecordedSpan(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_attributes(span.attributes),
            resource=resource,
            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            kind=span.kind,
            links=tuple(SpanLink(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            events=tuple(
                SpanEvent(event.name, event.time_unix_nano, _attributes(event.attributes))
                for event in span.events
            ),
        )
        for group in request.resource_spans
        for resource in [_attributes(group.resource.attributes)]
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    match value.WhichOneof("value"):
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()  # as in OTLP's JSON
        case None:
            return None
        case kind:
            return getattr(value, kind)  # type: ignore[no-any-return]
