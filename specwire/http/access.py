"""What all requests and responses have in common: ids, warnings, counts, and the access log.

That has one record a request, without its query, its texts and its client's address.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specwire.errors import InvalidRequestError
from specwire.http.bodies.part import Ignored
from specwire.http.errors import ApiError
from specwire.http.metrics import RequestCounts
from specwire.telemetry import logs
from specwire.telemetry.propagation import REQUEST_ID

log = logging.getLogger(__name__)

_SAMPLED = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_MAX_PATH_LEN = 256
_MAX_NAMES, _MAX_NAME_LEN = 16, 64
"""Of ignored parameters, in a warning."""
_REFUSED = "specwire.refused"
"""Key of a scope: why its request was refused."""
NO_RESPONSE = 499
"""The status of a request whose client left before its response began, as nginx writes it; never sent."""


def mark_refused(scope: Scope, error: Exception) -> None:
    """Have the entry say which field was refused, with its value unless that is a text."""
    if isinstance(error, InvalidRequestError):
        scope[_REFUSED] = logs.refused(error)
    elif isinstance(error, ApiError):
        told = {"field": error.param, "reason": error.code}
        scope[_REFUSED] = {name: value for name, value in told.items() if value}


class AccessEntry:
    """What is logged of one request.

    Attributes:
        status: of its response so far.
        is_complete: whether all of that was sent.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._began_ns = time.perf_counter_ns()
        self.status = NO_RESPONSE
        self.is_complete = False
        self._num_bytes = 0

    def see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))

    @property
    def duration_s(self) -> float:
        """Since it began."""
        return (time.perf_counter_ns() - self._began_ns) / 1e9

    def log(self) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        fields = {
            "method": self._scope["method"],
            "path": self._scope["raw_path"].decode("latin-1")[:_MAX_PATH_LEN],  # escaped, as it came
            "status": self.status,
            "duration_ms": round(self.duration_s * 1e3, 1),
            "bytes": self._num_bytes,
            "client": address_kind((self._scope.get("client") or ("",))[0]),
            "request_id": self._scope["specwire.request_id"],
        }
        traced = _SAMPLED.fullmatch(dict(self._scope["headers"]).get(b"traceparent", b""))
        fields |= self._scope.get(_REFUSED, {})
        log.info("access", extra=fields | ({"trace_id": traced[1].decode()} if traced else {}))


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


class Labelled:
    """Gives every response an `x-request-id`, the client's own if it is valid; logs and counts the request.

    A parameter that was ignored (`--lenient`) is named in a `warning`.
    """

    def __init__(
        self, app: ASGIApp, counts: RequestCounts, paths: Mapping[Any, str], *, is_lenient: bool
    ) -> None:
        """`paths` are those of the routes, by their handlers."""
        self._app = app
        self._counts = counts
        self._paths = paths
        self._is_lenient = is_lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else "req-" + secrets.token_hex(12)
        ignored = Ignored() if self._is_lenient else None
        scope["specwire.request_id"], scope["specwire.ignored"] = request_id, ignored
        entry = scope["specwire.entry"] = AccessEntry(scope)

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if ignored:
                    headers["warning"] = warning(ignored)
                if headers.get("content-type", "").startswith("text/event-stream"):
                    self._counts.first_token_s.add(entry.duration_s)
            entry.see(message)
            await send(message)

        self._counts.num_active += 1
        try:
            await self._app(scope, receive, send_labelled)
        finally:
            self._counts.num_active -= 1
            self._counts.ended(self._paths.get(scope.get("endpoint"), ""), entry.status, entry.duration_s)
            entry.log()


def warning(ignored: Ignored) -> str:
    """The header's value, of printable ASCII.

    >>> warning({"top_a": None, "mirostat": None})
    '299 - "ignored: top_a, mirostat"'
    """
    names = [json.dumps(name[:_MAX_NAME_LEN])[1:-1] for name in ignored][:_MAX_NAMES]
    left_out = len(ignored) - len(names)
    text = ", ".join(names) + (f" and {left_out} more" if left_out else "")
    return f'299 - "ignored: {text}"'
