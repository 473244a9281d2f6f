"""What all requests and responses have in common: ids, warnings, spans, counts, and the access log.

That has one record a request, without its query, its texts and its client's address.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specwire.errors import InvalidRequestError
from specwire.http.bodies.part import Ignored
from specwire.http.connections import Connections
from specwire.http.errors import ApiError
from specwire.http.metrics import RequestCounts
from specwire.telemetry import logs, semantics
from specwire.telemetry.propagation import REQUEST_ID
from specwire.telemetry.tracing import CANCELLED, Attributes, Span, SpanKind, Tracing, described, error_type

log = logging.getLogger(__name__)

_SAMPLED = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f][13579bdf](-.*)?")
_ABSOLUTE_FORM = re.compile(rb"https?://([^/#]+)(.*)", re.IGNORECASE)
_MAX_PATH_LEN = 256
_MAX_NAMES, _MAX_NAME_LEN = 16, 64
"""Of ignored parameters, in a warning."""
_REFUSED = "specwire.refused"
"""Key of a scope: why its request was refused."""
NO_RESPONSE = 499
"""The status of a request whose client left before its response began, as nginx writes it; never sent."""
_PROBED = "/health"
"""Every few seconds, and not traced."""
_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE")
)
"""Known to the conventions; others would make names of spans without end."""


def mark_failed(scope: Scope, error: Exception, status: int) -> None:
    """Have span and log say why a request fails.

    What its client did wrong, by the status, is no error of the server. The log names the field that was
    refused, with its value unless that is a text.
    """
    if status >= 500:
        scope["specwire.span"].fail(error_type(error), described(error))
    if isinstance(error, InvalidRequestError):
        scope[_REFUSED] = logs.refused(error)
    elif isinstance(error, ApiError):
        told = {"field": logs.shown(error.param or ""), "reason": error.code}
        scope[_REFUSED] = {name: value for name, value in told.items() if value}


@dataclass(frozen=True, eq=False)
class Observed:
    """Gives every response an `x-request-id`, the client's own if it is valid; traces, counts and logs the
    request, whose id and span (which need not be recorded) are in its scope.

    A parameter that was ignored (`--lenient`) is named in a `warning`.
    """

    app: ASGIApp
    routes: Sequence[Route]
    connections: Connections
    counts: RequestCounts
    tracer: Tracing
    is_lenient: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _to_origin_form(scope)
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else "req-" + secrets.token_hex(12)
        ignored = Ignored() if self.is_lenient else None
        scope["specwire.request_id"], scope["specwire.ignored"] = request_id, ignored
        route = next((each.path for each in self.routes if each.matches(scope)[0] is not Match.NONE), "")
        sent = _Sent()

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if self.connections.is_closing:
                    headers["connection"] = "close"
                if ignored:
                    headers["warning"] = warning(ignored)
                if headers.get("content-type", "").startswith("text/event-stream"):
                    self.counts.first_token_s.add(sent.duration_s)
            sent.see(message)
            await send(message)

        self.counts.num_active += 1
        try:
            with self._span(scope, route) as span:
                scope["specwire.span"] = span
                await self.app(scope, receive, send_labelled)
                sent.tell(span)
        finally:
            self.counts.num_active -= 1
            self.counts.ended(route, sent.status, sent.duration_s)
            sent.log(scope)

    def _span(self, scope: Scope, route: str) -> Span:
        """The SERVER span, from the headers to the end of the response."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        parent = self.tracer.propagators.read(headers)
        if scope["path"] == _PROBED or not self.tracer.enabled:
            return Span(parent)
        method = scope["method"] if scope["method"] in _METHODS else ""
        server, client = scope.get("server"), scope.get("client")
        attributes: Attributes = {
            semantics.HTTP_REQUEST_METHOD: method or "_OTHER",
            semantics.HTTP_ROUTE: route or None,
            semantics.URL_PATH: scope["path"],
            semantics.URL_SCHEME: scope["scheme"],
            semantics.NETWORK_PROTOCOL_VERSION: scope["http_version"],
            semantics.SERVER_ADDRESS: server[0] if server else None,
            semantics.SERVER_PORT: server[1] if server else None,
            semantics.CLIENT_ADDRESS: client[0] if client else None,
            semantics.USER_AGENT_ORIGINAL: dict(headers).get("user-agent"),
            semantics.REQUEST_ID: scope["specwire.request_id"],
        }
        name = f"{method or 'HTTP'} {route}".rstrip()
        return self.tracer.span(name, kind=SpanKind.SERVER, parent=parent, attributes=attributes)


def _to_origin_form(scope: Scope) -> None:
    """Read `GET http://HOST/health` as `GET /health`, whose host counts (RFC 9112, section 3.2.2)."""
    if found := _ABSOLUTE_FORM.fullmatch(scope["raw_path"]):
        host, path = found[1], found[2] or b"/"
        scope["raw_path"], scope["path"] = path, unquote(path.decode("ascii"))
        scope["headers"] = [(b"host", host), *(each for each in scope["headers"] if each[0] != b"host")]


class _Sent:
    """What was sent of one response so far."""

    def __init__(self) -> None:
        self._began_ns = time.perf_counter_ns()
        self.status = NO_RESPONSE
        self._is_complete = False
        self._num_bytes = 0

    @property
    def duration_s(self) -> float:
        """Since the request began."""
        return (time.perf_counter_ns() - self._began_ns) / 1e9

    def see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))

    def tell(self, span: Span) -> None:
        """Have the span say how it ended."""
        if self.status != NO_RESPONSE:
            span.set({semantics.HTTP_RESPONSE_STATUS_CODE: self.status})
        if not self._is_complete or self.status == NO_RESPONSE:
            span.fail(CANCELLED, "the client has disconnected")
        elif self.status >= 500:
            span.fail(str(self.status))

    def log(self, scope: Scope) -> None:
        """Write the record."""
        if not log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["raw_path"].decode("latin-1")[:_MAX_PATH_LEN],  # escaped, as it came
            "status": self.status,
            "duration_ms": round(self.duration_s * 1e3, 1),
            "bytes": self._num_bytes,
            "client": address_kind((scope.get("client") or ("",))[0]),
            "request_id": scope["specwire.request_id"],
        }
        traced = _SAMPLED.fullmatch(scope["specwire.span"].traceparent)
        fields |= scope.get(_REFUSED, {})
        log.info("access", extra=fields | ({"trace_id": traced[1]} if traced else {}))


def address_kind(host: str) -> str:
    """`loopback`, `private`, `public`, or `unknown` of what is no IP address.

    >>> [address_kind(host) for host in ("127.0.0.1", "10.1.2.3", "2606:4700::1111", "")]
    ['loopback', 'private', 'public', 'unknown']
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    return "loopback" if address.is_loopback else "public" if address.is_global else "private"


def warning(ignored: Ignored) -> str:
    """The header's value, of printable ASCII.

    >>> warning({"top_a": None, "mirostat": None})
    '299 - "ignored: top_a, mirostat"'
    """
    names = [json.dumps(name[:_MAX_NAME_LEN])[1:-1] for name in ignored][:_MAX_NAMES]
    left_out = len(ignored) - len(names)
    text = ", ".join(names) + (f" and {left_out} more" if left_out else "")
    return f'299 - "ignored: {text}"'
