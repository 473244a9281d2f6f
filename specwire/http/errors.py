"""Errors in OpenAI's format: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from specwire.errors import (
    ContextLengthError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    SpecwireError,
)

log = logging.getLogger(__name__)

INVALID = "invalid_request_error"

#: gRPC status of one of our errors → HTTP status, type, code.
_BY_STATUS = {
    "INVALID_ARGUMENT": (400, INVALID, "invalid_value"),
    "UNIMPLEMENTED": (400, INVALID, "unsupported_value"),
    "UNAUTHENTICATED": (401, INVALID, "invalid_api_key"),
    "PERMISSION_DENIED": (403, INVALID, "permission_denied"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error", "rate_limit_exceeded"),
    "UNAVAILABLE": (503, "service_unavailable_error", "unavailable"),
    "CANCELLED": (503, "service_unavailable_error", "cancelled"),
    "DEADLINE_EXCEEDED": (504, "timeout_error", "deadline_exceeded"),
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response.

    Attributes:
        status: of HTTP.
        kind: the `type` of OpenAI's error object.
        param: the invalid field of the request, if one is.
        code: machine-readable.
        headers: of the response.
    """

    status: int
    message: str
    _: KW_ONLY
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def api_error(error: Exception) -> ApiError:
    """The error response of an exception; of a defect it reveals nothing, and the log has the details."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, SpecwireError) or error.status not in _BY_STATUS:
        log.error("defect while serving a request", exc_info=error)
        return ApiError(500, "internal error; the server's log has the details", kind="server_error")
    status, kind, code = _BY_STATUS[error.status]
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else code
    param = None
    if isinstance(error, InvalidRequestError):
        param = error.field
    is_ending = isinstance(error, RequestCancelledError)  # a client that cancels is no longer there
    message = "the server is shutting down" if is_ending else str(error)
    return ApiError(status, message, kind=kind, param=param, code=code, headers=_headers(error))


def _headers(error: SpecwireError) -> dict[str, str]:
    """When to retry; OpenAI's clients read all three headers."""
    if not isinstance(error, ResourceExhaustedError):
        return {}
    if error.retry_after_ms is None:
        return {"x-should-retry": "false"}
    seconds = max(1, math.ceil(error.retry_after_ms / 1e3))
    return {"retry-after": str(seconds), "retry-after-ms": str(error.retry_after_ms)}
