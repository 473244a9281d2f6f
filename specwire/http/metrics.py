"""The front's own metrics (`--metrics-address`), and `GET /metrics`: those of the coordinator, passed on from
its endpoint (`--metrics-from`)."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from http import HTTPStatus

from starlette.responses import Response

from specwire.http.errors import ApiError
from specwire.telemetry.metrics import Gauge, Histogram, HistogramData, Metric

# Those that OpenTelemetry advises for HTTP, and further ones for answers that are generated.
_DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_FIRST_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_OFF = (
    "metrics are not served here: `serve` needs the extra (pip install '.[metrics]'), `up` "
    "--metrics-address, `http` --metrics-from with the coordinator's --metrics-address"
)
_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20


class RequestCounts:
    """Counts over the requests of a front, those for its health included.

    Attributes:
        num_active: requests whose response has not ended.
        duration_s: of those that have ended, by route (empty for none that is served) and status.
        first_token_s: of streamed responses, whose head waits for the first token.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self.duration_s: dict[tuple[str, ...], HistogramData] = {}
        self.first_token_s = HistogramData(_FIRST_BOUNDS)

    def ended(self, route: str, status: int, duration_s: float) -> None:
        """A request has, with its response or without."""
        key = (route, str(status))
        self.duration_s.setdefault(key, HistogramData(_DURATION_BOUNDS)).add(duration_s)


TABLE: tuple[Metric[RequestCounts], ...] = (
    Histogram(
        "http_server_request_duration_seconds",
        "Time of HTTP requests to the end of their response; 499 where the client left before it began.",
        lambda counts: counts.duration_s,
        ("http_route", "http_response_status_code"),
    ),
    Gauge(
        "http_server_active_requests",
        "HTTP requests whose response has not ended.",
        lambda counts: counts.num_active,
    ),
    Histogram(
        "specwire_http_time_to_first_token_seconds",
        "Time from an HTTP request's arrival to the first token of its streamed response.",
        lambda counts: counts.first_token_s,
    ),
)


async def passed_on(address: str, accept: str) -> Response:
    """The answer of the coordinator's endpoint at this address: ApiError 404 without one, 503 without an
    answer."""
    if not address:
        raise ApiError(404, _OFF, code="metrics_off")
    try:
        return await asyncio.to_thread(_asked, address, accept)
    except (OSError, ValueError, http.client.HTTPException) as error:
        message = f"no metrics from {address}: {error or type(error).__name__}"
        raise ApiError(503, message, kind="service_unavailable_error", code="unavailable") from None


def _asked(address: str, accept: str) -> Response:
    with contextlib.closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", "/metrics", headers={"accept": accept})
        answer = connection.getresponse()
        body = answer.read(_MAX_BYTES + 1)
        if answer.status != HTTPStatus.OK or len(body) > _MAX_BYTES:
            raise ValueError(f"{answer.status} {answer.reason}, {len(body)} bytes")
        return Response(body, headers={"content-type": answer.headers["content-type"]})
