"""Span files: OTLP in protobuf's JSON, or a download from Jaeger's UI.

OTLP: one `ExportTraceServiceRequest` on each line (the collector's file exporter), or one of them, or an
array of them, as the whole file. Unlike in other protobuf JSON, ids are hex.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tools.files import read_text

Value = str | bool | int | float | Sequence[Any] | Mapping[str, Any] | None

_ERROR_CODES = (2, "STATUS_CODE_ERROR")


class SpanLink(NamedTuple):
    """A span that another one goes back to without being its child; ids as in `RecordedSpan`."""

    trace_id: str
    span_id: str


class SpanEvent(NamedTuple):
    """Something that happened at one moment of a span, by the clock of its process."""

    name: str
    time_ns: int
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpan:
    """A span as its process recorded it.

    Attributes:
        trace_id, span_id, parent_id: lower-case hex; `parent_id` of a root is empty.
        start_ns, end_ns: since the epoch, by the clock of the process.
        resource: of the process, including `service.name`.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    resource: Mapping[str, Value]
    is_error: bool = False
    links: Sequence[SpanLink] = ()
    events: Sequence[SpanEvent] = ()

    @property
    def service_name(self) -> str:
        """Empty if the resource has none."""
        return str(self.resource.get("service.name", ""))

    @property
    def interval(self) -> tuple[int, int]:
        return self.start_ns, self.end_ns

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def is_failed(self) -> bool:
        """Whether an error or a cancel ended it."""
        return self.is_error or names.ERROR_TYPE in self.attributes

    def count(self, name: str, default: int = 0) -> int:
        """A count in an attribute, or the default, as spans are untrusted."""
        value = self.attributes.get(name)
        return value if type(value) is int and value >= 0 else default

    def text(self, name: str) -> str:
        """A text in an attribute; empty without one."""
        value = self.attributes.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> float | None:
        """A number in an attribute that is no less than 0; None without one."""
        value = self.attributes.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            return None
        return float(value)


def read(path: Path) -> list[RecordedSpan]:
    """All spans of a file.

    Raises:
        ConfigError: naming file, line and problem.
    """
    text = read_text("", path)
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    found: list[RecordedSpan] = []
    for n, document in _documents(path, text):
        try:
            found += map(_checked, spans_of(document))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else error
            message = f"{path}, line {n}: is neither OTLP's traces nor a download from Jaeger ({problem})"
            raise ConfigError(message) from None
    return found


def _checked(span: RecordedSpan) -> RecordedSpan:
    if not 0 <= span.start_ns <= span.end_ns < 1 << 64:
        raise ValueError(f"span {span.span_id} ends before it starts, or has no times since the epoch")
    return span


def _documents(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Each JSON value of the file with its line: one a line if the first line is valid, else one in total."""
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        json.loads(lines[0][1])
    except (ValueError, RecursionError):
        lines = [(1, text)]
    for n, line in lines:
        try:
            yield n, json.loads(line)
        except (ValueError, RecursionError) as error:  # or a number of thousands of digits
            number, problem = n + getattr(error, "lineno", 1) - 1, getattr(error, "msg", error)
            raise ConfigError(f"{path}, line {number}: is not JSON ({problem})") from None


def spans_of(document: Any) -> Iterator[RecordedSpan]:
    """The spans of a JSON value.

    Raises:
        Exception: of Python's own kinds; it is neither OTLP's traces nor a download from Jaeger.
    """
    if isinstance(document, list):
        for each in document:
            yield from spans_of(each)
    elif "data" in document:
        for trace in document["data"]:
            for span in trace["spans"]:
                yield _jaeger_span(span, trace["processes"][span["processID"]])
    elif document:
        for group in document["resourceSpans"]:
            resource = _attributes(group.get("resource", {}))
            for scope in group.get("scopeSpans", ()):
                yield from (_otlp_span(span, resource) for span in scope.get("spans", ()))


def _otlp_span(span: dict[str, Any], resource: Mapping[str, Value]) -> RecordedSpan:
    parent = span.get("parentSpanId")
    return RecordedSpan(
        name=str(span.get("name", "")),
        trace_id=_id(span["traceId"], 16),
        span_id=_id(span["spanId"], 8),
        parent_id=_id(parent, 8) if parent else "",
        start_ns=int(span.get("startTimeUnixNano", 0)),
        end_ns=int(span.get("endTimeUnixNano", 0)),
        attributes=_attributes(span),
        resource=resource,
        is_error=span.get("status", {}).get("code") in _ERROR_CODES,
        links=tuple(SpanLink(_id(of["traceId"], 16), _id(of["spanId"], 8)) for of in span.get("links", ())),
        events=tuple(
            SpanEvent(str(event.get("name", "")), int(event.get("timeUnixNano", 0)), _attributes(event))
            for event in span.get("events", ())
        ),
    )


def _id(text: str, num_bytes: int) -> str:
    if len(bytes.fromhex(text)) != num_bytes:
        raise ValueError(f"{text!r} is not {num_bytes} bytes in hex")
    return text.lower()


def _attributes(of: dict[str, Any], name: str = "attributes") -> dict[str, Value]:
    return {str(pair["key"]): _value(pair.get("value", {})) for pair in of.get(name, ())}


def _value(typed: dict[str, Any]) -> Value:
    """`{"intValue": "5"}` to 5."""
    if not typed:
        return None
    [(kind, value)] = typed.items()
    match kind:
        case "intValue":  # in a string, since JSON's numbers are doubles
            return int(value)
        case "doubleValue":  # NaN and infinity are strings
            return float(value)
        case "arrayValue":
            return [_value(item) for item in value.get("values", ())]
        case "kvlistValue":
            return _attributes(value, "values")
    return value  # type: ignore[no-any-return]


def _jaeger_span(span: dict[str, Any], process: dict[str, Any]) -> RecordedSpan:
    tags = _tags(span)
    parents, links = (
        [
            SpanLink(_id(of["traceID"], 16), _id(of["spanID"], 8))
            for of in span.get("references", ())
            if of["refType"] == kind
        ]
        for kind in ("CHILD_OF", "FOLLOWS_FROM")
    )
    start_ns = 1000 * int(span["startTime"])
    return RecordedSpan(
        name=str(span["operationName"]),
        trace_id=_id(span["traceID"], 16),
        span_id=_id(span["spanID"], 8),
        parent_id=parents[0].span_id if parents else "",
        start_ns=start_ns,
        end_ns=start_ns + 1000 * int(span["duration"]),
        attributes=tags,
        resource={"service.name": process.get("serviceName", ""), **_tags(process)},
        is_error=tags.get("error") is True,
        links=tuple(links),
        events=tuple(
            SpanEvent(str(fields.pop("event", "")), 1000 * int(event["timestamp"]), fields)
            for event in span.get("logs", ())
            for fields in [_tags(event, "fields")]
        ),
    )


def _tags(of: dict[str, Any], name: str = "tags") -> dict[str, Value]:
    return {str(tag["key"]): tag.get("value") for tag in of.get(name, ())}
