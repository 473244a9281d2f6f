"""The access log: one record a request, without its query, its texts and its client's address."""

from __future__ import annotations

import ipaddress
import logging
import re
import time

from starlette.types import Message, Scope

from specwire.errors import InvalidRequestError
from specwire.http.errors import ApiError
from specwire.telemetry import logs

log = logging.getLogger(__name__)

_SAMPLED = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_MAX_PATH_LEN = 256
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

    def __init__(self, scope: Scope, request_id: str) -> None:
        self._scope = scope
        self._request_id = request_id
        self._began_ns = time.perf_counter_ns()
        self.status = NO_RESPONSE
        self.is_complete = False
        self._num_bytes = 0

    def see(self, message: Message) -> None:
        """A part of its response is sent."""
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
        """It has ended."""
        if not log.isEnabledFor(logging.INFO):
            return
        fields = {
            "method": self._scope["method"],
            "path": self._scope["raw_path"].decode("latin-1")[:_MAX_PATH_LEN],  # escaped, as it came
            "status": self.status,
            "duration_ms": round(self.duration_s * 1e3, 1),
            "bytes": self._num_bytes,
            "client": address_kind((self._scope.get("client") or ("",))[0]),
            "request_id": self._request_id,
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
