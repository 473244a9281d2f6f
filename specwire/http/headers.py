"""What all requests and responses have in common: their ids, warnings, log and counts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specwire.http.access import AccessEntry
from specwire.http.bodies.part import Ignored
from specwire.http.metrics import RequestCounts
from specwire.telemetry.propagation import REQUEST_ID

_MAX_NAMES = 16
_MAX_NAME_LEN = 64


class Labelled:
    """Gives every response an `x-request-id`, the client's own if it is valid; logs and counts the request.

    A parameter that was ignored (`--lenient`) is named in a `warning`.
    """

    def __init__(
        self, app: ASGIApp, counts: RequestCounts, paths: Mapping[Any, str], *, is_lenient: bool
    ) -> None:
        """Args:
        paths: of the routes, by their handlers.
        """
        self._app = app
        self._counts = counts
        self._paths = paths
        self._is_lenient = is_lenient

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else "req-" + secrets.token_hex(12)
        ignored = Ignored() if self._is_lenient else None
        scope["specwire.request_id"], scope["specwire.ignored"] = request_id, ignored
        entry = scope["specwire.entry"] = AccessEntry(scope, request_id)

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if ignored is not None and ignored.names:
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

    >>> warning(Ignored({"top_a": None, "mirostat": None}))
    '299 - "ignored: top_a, mirostat"'
    """
    names = [json.dumps(name[:_MAX_NAME_LEN])[1:-1] for name in ignored.names][:_MAX_NAMES]
    left_out = len(ignored.names) - len(names)
    text = ", ".join(names) + (f" and {left_out} more" if left_out else "")
    return f'299 - "ignored: {text}"'
