"""A small OTLP collector over gRPC, which keeps spans in memory."""

from __future__ import annotations

import base64
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from specwire.errors import ConfigError
from tools.timeline.spans import RecordedSpan, spans_of

MAX_BYTES = 64 << 20
_OPTIONS = (("grpc.so_reuseport", 0),)
_GRACE_S = 1.0
_IDS = ("traceId", "spanId", "parentSpanId")


class SpanReceiver(TraceServiceServicer):
    """Receives while the `with` lasts, and keeps the latest spans.

    They are kept up to a size on the wire; the newest message always is.

    Attributes:
        endpoint: what to set OTEL_EXPORTER_OTLP_ENDPOINT to.
    """

    def __init__(self, address: str = "127.0.0.1:0", max_bytes: int = MAX_BYTES) -> None:
        self._address = address
        self._changed = threading.Condition()
        self._messages: deque[tuple[int, list[RecordedSpan]]] = deque()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def spans(self) -> list[RecordedSpan]:
        """Spans kept, in order of arrival."""
        with self._changed:
            return [span for _, spans in self._messages for span in spans]

    def wait(self, predicate: Callable[[list[RecordedSpan]], object], timeout_s: float | None = None) -> bool:
        """Wait until the predicate holds for the spans; False at the timeout."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: predicate(self.spans), timeout_s))

    def keep(self, request: ExportTraceServiceRequest) -> None:
        """Add an export; may be called from any thread."""
        message = request.ByteSize(), _spans_of(request)
        with self._changed:
            self._messages.append(message)
            self._num_bytes += message[0]
            while self._num_bytes > self._max_bytes and len(self._messages) > 1:
                self._num_bytes -= self._messages.popleft()[0]
            self._changed.notify_all()

    def __enter__(self) -> Self:
        """Raises:
        ConfigError: the address cannot be bound.
        """
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2), options=_OPTIONS)
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ConfigError(f"{self._address}: cannot be listened on ({error})") from None
        self.endpoint = f"http://{self._address.rpartition(':')[0]}:{port}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=_GRACE_S).wait()  # running exports are answered

    def Export(  # noqa: N802 - the protocol's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.keep(request)
        return ExportTraceServiceResponse()


def _spans_of(request: ExportTraceServiceRequest) -> list[RecordedSpan]:
    """By way of OTLP's JSON, in which ids are hex and not base64."""
    document = json_format.MessageToDict(request)
    for group in document.get("resourceSpans", ()):
        for scope in group.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for of in (span, *span.get("links", ())):
                    of |= {name: base64.b64decode(of[name]).hex() for name in _IDS if name in of}
    return list(spans_of(document))
