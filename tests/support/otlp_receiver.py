"""OTLP receivers for tests: specwire's own over gRPC, one over HTTP, and ports where none answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tools.timeline.receiver import SpanReceiver
from tools.timeline.spans import RecordedSpan


class OtlpReceiver(SpanReceiver):
    """Receives OTLP over gRPC while the `with` lasts.

    Attributes:
        requests: received, as they were sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[ExportTraceServiceRequest] = []

    def keep(self, request: ExportTraceServiceRequest) -> None:
        self.requests.append(request)
        super().keep(request)

    def wait_for(
        self, predicate: Callable[[list[RecordedSpan]], object], timeout_s: float = 10
    ) -> list[RecordedSpan]:
        """Return the spans as soon as the predicate holds for them; AssertionError after the timeout."""
        held = self.wait(predicate, timeout_s)
        assert held, f"after {timeout_s} s only {[span.name for span in self.spans]}"
        return self.spans


class OtlpHttpReceiver(OtlpReceiver):
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

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def refusing() -> Iterator[int]:
    """A port that is bound, and not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port where the kernel accepts connections and no process answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]
