"""The `OTEL_*` variables: read and checked here, so that a wrong one is refused by its name (`ConfigError`).

What OpenTelemetry's SDK reads itself (samplers, limits of spans, headers, certificates) is only checked: the
SDK would log a warning, or a traceback, and go on with another value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specwire.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_SAMPLERS = (
    *("always_on", "always_off", "traceidratio"),
    *("parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio"),
)
_LIMITS = (
    *("OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    *("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"),
    *("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT"),
    *("OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_LINK_COUNT_LIMIT"),
)
_HEADER = re.compile(
    r"[ \t]*[\x21\x23-\x27\x2a\x2b\x2d\x2e\x30-\x39\x41-\x5a\x5e-\x7a\x7c\x7e]+[ \t]*="
    r"[ \t]*[\x20\x21\x23-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]*[ \t]*"
)
_EXPORT_TIMEOUT_S = 2.0
"""Shorter than the SDK's 10 s: a collector that is silent must not hold a full queue for long."""


def variable(*names: str) -> str:
    """The first of these environment variables that is not empty; else empty."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def _otlp(name: str) -> tuple[str, str]:
    """The variables with a setting of the exporter: that for traces counts before the one for all signals."""
    return name.replace("OTLP_", "OTLP_TRACES_"), name


def is_tracing_requested() -> bool:
    """Whether the variables name an exporter, or where to."""
    if variable("OTEL_SDK_DISABLED").lower() == "true":
        return False
    exporter = variable("OTEL_TRACES_EXPORTER")
    if exporter not in ("", "none", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER={exporter}: must be otlp or none")
    return exporter == "otlp" or (exporter == "" and bool(variable(*_otlp("OTEL_EXPORTER_OTLP_ENDPOINT"))))


def batch_limits() -> tuple[int, int, int]:
    """Ended spans that may wait, their longest wait for a full batch in ms, and the spans of a batch:
    `OTEL_BSP_*`."""
    max_queued = _whole("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
    batch_name = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
    max_batch = _whole(batch_name, min(512, max_queued))
    if max_batch > max_queued:
        raise ConfigError(f"{batch_name}={max_batch}: is over OTEL_BSP_MAX_QUEUE_SIZE={max_queued}")
    return max_queued, _whole("OTEL_BSP_SCHEDULE_DELAY", 5000), max_batch


def has_span_limits() -> bool:
    """Whether spans are limited otherwise than by default."""
    return any(name in os.environ for name in _LIMITS)


def check() -> None:
    """Check what the SDK reads itself; before it is imported, as it reads some of it then."""
    known = f"is not one of {', '.join(_SAMPLERS)}"
    _check("OTEL_TRACES_SAMPLER", lambda value: value.lower() in _SAMPLERS, known)
    if variable("OTEL_TRACES_SAMPLER").lower().endswith("traceidratio"):
        of_ratio = "OTEL_TRACES_SAMPLER_ARG"
        _check(of_ratio, lambda value: 0 <= _number(of_ratio, value) <= 1, "must be from 0 to 1")
    for name in _LIMITS:
        if variable(name):
            _whole(name, 0, least=0)
    compressions = ("gzip",) if _protocol() == "grpc" else ("none", "gzip", "deflate")
    for name in _otlp("OTEL_EXPORTER_OTLP_COMPRESSION"):
        _check(name, lambda value: value.lower() in compressions, "is no compression of this protocol")
    _check("OTEL_RESOURCE_ATTRIBUTES", _is_pairs, "is not name=value,...")
    for name in _otlp("OTEL_EXPORTER_OTLP_HEADERS"):
        # They may be secrets: neither shown here, nor in the SDK's warning of those that it leaves out.
        if not _are_headers(variable(name)):
            raise ConfigError(f"{name}=(not shown): is not name=value,...")
    for name in _otlp("OTEL_EXPORTER_OTLP_ENDPOINT"):
        _check(name, _is_endpoint, "is no address of a collector, as http://HOST:PORT")
    for name in (
        *_otlp("OTEL_EXPORTER_OTLP_CERTIFICATE"),
        *_otlp("OTEL_EXPORTER_OTLP_CLIENT_KEY"),
        *_otlp("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"),
    ):
        _check(name, lambda value: Path(value).is_file(), "is not a file")


def exporter() -> SpanExporter:
    """The exporter that the variables describe.

    Raises:
        ImportError: a package is not installed.
    """
    timeout_s, protocol = _export_timeout_s(), _protocol()
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        return over_grpc.OTLPSpanExporter(timeout=timeout_s)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter(timeout=timeout_s)
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol}: must be grpc or http/protobuf")


def _protocol() -> str:
    return variable(*_otlp("OTEL_EXPORTER_OTLP_PROTOCOL")) or "grpc"


def _export_timeout_s() -> float:
    """Of one export, in seconds: the shorter of OTLP's (in seconds) and the batch processor's (in ms)."""
    timeout_s = _EXPORT_TIMEOUT_S
    for name in reversed(_otlp("OTEL_EXPORTER_OTLP_TIMEOUT")):
        if text := variable(name):
            timeout_s = _number(name, text)
            if timeout_s <= 0:
                raise ConfigError(f"{name}={text}: must be over 0")
    if variable("OTEL_BSP_EXPORT_TIMEOUT"):
        timeout_s = min(timeout_s, _whole("OTEL_BSP_EXPORT_TIMEOUT", 0) / 1e3)
    return timeout_s


def _is_pairs(value: str) -> bool:
    return all("=" in pair for pair in value.split(",") if pair.strip())


def _are_headers(value: str) -> bool:
    """As the SDK takes them."""
    return all(_HEADER.fullmatch(pair) for pair in value.split(",") if pair.strip())


def _is_endpoint(value: str) -> bool:
    """For gRPC what it resolves goes too, such as HOST:PORT or dns:///NAME:PORT."""
    try:
        url = urlsplit(value)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:
        return False
    if url.scheme in ("http", "https"):
        return has_host and not re.search(r"\s", value)
    return _protocol() == "grpc" and not re.search(r"\s", value)


def _check(name: str, is_valid: Callable[[str], bool], problem: str) -> None:
    text = variable(name)
    if text and not is_valid(text):
        raise ConfigError(f"{name}={text}: {problem}")


def _whole(name: str, default: int, *, least: int = 1) -> int:
    text = variable(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise ConfigError(f"{name}={text}: must be a whole number, at least {least}")
    return int(text)


def _number(name: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+|[0-9]+\.", text):
        raise ConfigError(f"{name}={text}: must be a number")
    return float(text)
