"""Real OTLP receivers for tests, over gRPC and over HTTP, that keep the spans they get in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any, Self

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


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span as it arrived. Ids are hex; `parent_id` of a root is empty; times are ns since the epoch."""

    name: str
    service_name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    is_error: bool


class _Receiver:
    """What both receivers share: the spans, and waiting for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[SpanRecord] = []

    @property
    def spans(self) -> list[SpanRecord]:
        """Those received so far, in order of arrival."""
        with self._changed:
            return list(self._spans)

    def wait_for(
        self, predicate: Callable[[list[SpanRecord]], object], timeout_s: float = 10
    ) -> list[SpanRecord]:
        """Return the spans as soon as the predicate holds for them; AssertionError after the timeout."""
        with self._changed:
            held = self._changed.wait_for(lambda: predicate(self._spans), timeout_s)
            assert held, f"after {timeout_s} s only {[span.name for span in self._spans]}"
            return list(self._spans)

    def keep(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            self._spans += _records(request)
            self._changed.notify_all()


class OtlpReceiver(_Receiver):
    """Receives OTLP over gRPC while the `with` lasts.

    Attributes:
        endpoint: what to set OTEL_EXPORTER_OTLP_ENDPOINT to.
    """

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2))
        add_TraceServiceServicer_to_server(_Servicer(self.keep), self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop(grace=None).wait()


class OtlpHttpReceiver(_Receiver):
    """Receives OTLP over HTTP (`http/protobuf`) while the `with` lasts; otherwise as `OtlpReceiver`."""

    def __enter__(self) -> Self:
        keep = self.keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                found = self.path == "/v1/traces"
                if found:
                    keep(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if found else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Servicer(TraceServiceServicer):
    def __init__(self, keep: Callable[[ExportTraceServiceRequest], None]) -> None:
        self._keep = keep

    def Export(  # noqa: N802 - the protocol's name
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._keep(request)
        return ExportTraceServiceResponse()


def _records(request: ExportTraceServiceRequest) -> list[SpanRecord]:
    return [
        SpanRecord(
            name=span.name,
            service_name=resource.get("service.name", ""),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_attributes(span.attributes),
            resource=resource,
            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        )
        for group in request.resource_spans
        for resource in [_attributes(group.resource.attributes)]
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
