"""Checks of `Host` and `Origin`, against requests from pages of other sites.

A page of another site can send requests to this machine under its own host name, once the owner of the name
lets it resolve to this machine (DNS rebinding). It cannot choose `Host` and `Origin`. So a front that serves
only this machine refuses other names. It accepts addresses, which are not resolved, and which probes and
`kubectl port-forward` use.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from specwire.config.client import HttpConfig
from specwire.config.fields import comma_separated, split_address
from specwire.config.security.tls import is_loopback
from specwire.http.access import address_kind
from specwire.http.errors import ApiError
from specwire.http.exchange import refusal

_ANY = "*"
_EXPOSED = ("x-request-id", "warning", "retry-after", "retry-after-ms", "x-should-retry")


class Origins:
    """Refuses requests for other hosts and from pages of origins that are not allowed, on any route."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        if config.cors_origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=[_ANY],
                expose_headers=_EXPOSED,
            )
        host, _ = split_address("address", config.address)
        self._names = frozenset(comma_separated(config.allowed_hosts.lower()))
        self._allowed = config.cors_origins
        self._any = _ANY in self._names or not (self._names or is_loopback(host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.check(Headers(scope=scope))
        except ApiError as error:
            await refusal(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def check(self, headers: Mapping[str, str]) -> None:
        """Check that a request is for this front and, if a page sent it, that the page may use it, or
        ApiError 403."""
        host = headers.get("host", "").lower()
        name = _name(host)
        is_known = name in self._names or name == "localhost" or address_kind(name) != "unknown"
        if host and not (self._any or is_known):
            message = f"Host {host!r} is not served here; see --allowed-hosts"
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed")
        origin = headers.get("origin")
        if origin is None or _ANY in self._allowed or origin.lower() in self._allowed:
            return
        netloc = origin.lower().partition("://")[2]
        # Behind a proxy that changes `Host`, the origin is ours if its name is allowed.
        if not netloc or (netloc != host and _name(netloc) not in self._names):
            message = f"a page of {origin!r} may not use this server; see --cors-origin"
            raise ApiError(403, message, kind="permission_error", code="origin_not_allowed")


def _name(netloc: str) -> str:
    """`[::1]:8080` to `::1`."""
    host, _, port = netloc.rpartition(":")
    is_port = port.isdecimal() and host
    return (host if is_port else netloc).strip("[]")
