"""The SERVER span of each request, from its headers to the end of its response."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from specwire.http.access import NO_RESPONSE, AccessEntry
from specwire.telemetry import semantics
from specwire.telemetry.tracing import CANCELLED, Attributes, Span, SpanKind, Tracing, error_type

_PROBED = "/health"
"""Every few seconds, and not traced."""
_METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE")
)
"""Known to the conventions; others would make names of spans without end."""


class Traced:
    """Puts the request's span, which need not be recorded, into its scope as `specwire.span`."""

    def __init__(self, app: ASGIApp, tracer: Tracing, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._tracer = tracer
        self._routes = [route for route in routes if isinstance(route, Route)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _PROBED:
            scope["specwire.span"] = Span()
            await self._app(scope, receive, send)
            return
        with self._begin(scope) as span:
            scope["specwire.span"] = span
            await self._app(scope, receive, send)
            sent: AccessEntry = scope["specwire.entry"]
            if sent.status != NO_RESPONSE:
                span.set({semantics.HTTP_RESPONSE_STATUS_CODE: sent.status})
            if not sent.is_complete or sent.status == NO_RESPONSE:
                span.fail(CANCELLED, "the client has disconnected")
            elif sent.status >= 500:
                span.fail(str(sent.status))

    def _begin(self, scope: Scope) -> Span:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        parent = self._tracer.propagators.read(headers)
        if not self._tracer.enabled:
            return Span(parent)
        route = next((each.path for each in self._routes if each.matches(scope)[0] is not Match.NONE), "")
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
        return self._tracer.span(name, kind=SpanKind.SERVER, parent=parent, attributes=attributes)


def mark(span: Span, error: Exception, status: int) -> None:
    """Note why a request fails; what its client did wrong, by the status, is no error of the server."""
    if status >= 500:
        span.fail(error_type(error), str(error))
