"""Span files: OTLP in protobuf's JSON, or a download from Jaeger's UI.

OTLP: one `ExportTraceServiceRequest` on each line (the collector's file exporter), or one of them, or an
array of them, as the whole file. Unlike in other protobuf JSON, ids are hex.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from specwire.errors import ConfigError

Value = str | bool | int | float | Sequence[Any] | Mapping[str, Any] | None

INTERNAL, SERVER, CLIENT = 1, 2, 3
_KIND_NAMES = ("unspecified", "internal", "server", "client", "producer", "consumer")
"""In the order of OTLP's numbers, as Jaeger spells them."""
_ERROR_CODES = (2, "STATUS_CODE_ERROR")
_NON_FINITE = ("NaN", "Infinity", "-Infinity")
_SPANS_A_LINE = 512


class SpanLink(NamedTuple):
    """A span that another one goes back to without being its child; ids as in `RecordedSpan`."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class SpanEvent:
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
        kind: OTLP's number (`INTERNAL`, `SERVER`, `CLIENT`); 0 if not given.
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
    kind: int = 0
    links: Sequence[SpanLink] = ()
    events: Sequence[SpanEvent] = ()

    @property
    def service_name(self) -> str:
        """Empty if the resource has none."""
        return str(self.resource.get("service.name", ""))

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from start to end."""
        return self.end_ns - self.start_ns


def read(path: Path) -> list[RecordedSpan]:
    """All spans of a file.

    Raises:
        ConfigError: naming file, line, field and problem.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not text.strip():
        raise ConfigError(f"{path}: is empty")
    return [span for n, document in _documents(path, text) for span in _spans(document, f"{path}, line {n}")]


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
        except json.JSONDecodeError as error:
            number, column = n + error.lineno - 1, error.colno
            raise ConfigError(f"{path}, line {number}, column {column}: is not JSON ({error.msg})") from None
        except (ValueError, RecursionError):  # a number of thousands of digits, or nesting as deep
            raise ConfigError(f"{path}, line {n}: is not JSON of a sensible size") from None


def _spans(document: Any, where: str) -> Iterator[RecordedSpan]:
    if isinstance(document, list):
        for i, item in enumerate(document):
            yield from _spans_of_object(item, f"{where}: [{i}]")
    else:
        yield from _spans_of_object(document, f"{where}: ")


def _spans_of_object(document: Any, where: str) -> Iterator[RecordedSpan]:
    document = _as(dict, document, where.removesuffix(": "))
    if "data" in document:
        return _jaeger_spans(document, where)
    if document and "resourceSpans" not in document:
        raise ConfigError(f"{where.removesuffix(': ')}: has no resourceSpans, so it is not OTLP's traces")
    return _otlp_spans(document, where)


def _otlp_spans(request: dict[str, Any], where: str) -> Iterator[RecordedSpan]:
    for group, at in _items(request, "resourceSpans", where):
        resource = _attributes(_get(group, "resource", dict, at, {}), f"{at}.resource")
        for scope, in_scope in _items(group, "scopeSpans", f"{at}."):
            for span, of_span in _items(scope, "spans", f"{in_scope}."):
                yield _otlp_span(span, resource, of_span)


def _otlp_span(span: dict[str, Any], resource: Mapping[str, Value], where: str) -> RecordedSpan:
    status = _get(span, "status", dict, where, {})
    return _checked(
        RecordedSpan(
            name=_get(span, "name", str, where, ""),
            trace_id=_id(span, "traceId", 16, where),
            span_id=_id(span, "spanId", 8, where),
            parent_id=_id(span, "parentSpanId", 8, where) if span.get("parentSpanId") else "",
            start_ns=_time_ns(span, "startTimeUnixNano", where),
            end_ns=_time_ns(span, "endTimeUnixNano", where),
            attributes=_attributes(span, where),
            resource=resource,
            is_error=status.get("code") in _ERROR_CODES,
            kind=_kind(span.get("kind", 0)),
            links=tuple(
                SpanLink(_id(link, "traceId", 16, at), _id(link, "spanId", 8, at))
                for link, at in _items(span, "links", f"{where}.")
            ),
            events=tuple(
                SpanEvent(
                    _get(event, "name", str, at, ""),
                    _time_ns(event, "timeUnixNano", at),
                    _attributes(event, at),
                )
                for event, at in _items(span, "events", f"{where}.")
            ),
        ),
        where,
    )


def _kind(value: Any) -> int:
    """From a number, OTLP's name or Jaeger's; 0 for any other."""
    if isinstance(value, str):
        name = value.removeprefix("SPAN_KIND_").lower()
        return _KIND_NAMES.index(name) if name in _KIND_NAMES else 0
    return value if type(value) is int and 0 <= value < len(_KIND_NAMES) else 0


def _checked(span: RecordedSpan, where: str) -> RecordedSpan:
    if span.end_ns < span.start_ns:
        raise ConfigError(f"{where}: ends before it starts")
    return span


def _attributes(of: dict[str, Any], where: str) -> dict[str, Value]:
    return {
        _get(pair, "key", str, at): _value(_get(pair, "value", dict, at, {}), f"{at}.value")
        for pair, at in _items(of, "attributes", f"{where}.")
    }


def _value(typed: dict[str, Any], where: str) -> Value:
    """`{"intValue": "5"}` to 5."""
    if not typed:
        return None
    [(kind, value), *others] = typed.items()
    if others or kind not in _VALUES:
        raise ConfigError(f"{where}: is not one of {', '.join(_VALUES)}")
    return _VALUES[kind](value, f"{where}.{kind}")


def _int_value(value: Any, where: str) -> int:
    """A number, or a number in a string, since JSON numbers are doubles."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        return int(value)
    return int(_as(int, value, where))


def _double_value(value: Any, where: str) -> float:
    return float(value) if value in _NON_FINITE else float(_as(float, value, where))


def _array_value(value: Any, where: str) -> list[Value]:
    return [_value(item, at) for item, at in _items(_as(dict, value, where), "values", f"{where}.")]


def _kvlist_value(value: Any, where: str) -> dict[str, Value]:
    return _attributes({"attributes": _get(_as(dict, value, where), "values", list, where, [])}, where)


_VALUES: dict[str, Callable[[Any, str], Value]] = {
    "stringValue": lambda value, where: _as(str, value, where),
    "boolValue": lambda value, where: _as(bool, value, where),
    "intValue": _int_value,
    "doubleValue": _double_value,
    "arrayValue": _array_value,
    "kvlistValue": _kvlist_value,
    "bytesValue": lambda value, where: _as(str, value, where),
}


def _items(of: dict[str, Any], key: str, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of an optional list, each with its path."""
    for i, item in enumerate(_as(list, of.get(key, []), f"{where}{key}")):
        at = f"{where}{key}[{i}]"
        yield _as(dict, item, at), at


_REQUIRED: Any = object()
_KINDS = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


def _get(of: dict[str, Any], key: str, kind: type[Any], where: str, default: Any = _REQUIRED) -> Any:
    value = of.get(key, default)
    if value is _REQUIRED:
        raise ConfigError(f"{where}: has no {key}")
    return _as(kind, value, f"{where}.{key}")


def _as(kind: type[Any], value: Any, where: str) -> Any:
    kinds = (int, float) if kind is float else (kind,)
    if type(value) not in kinds:
        raise ConfigError(f"{where}: is not {_KINDS[kind]}")
    return value


def _id(of: dict[str, Any], key: str, num_bytes: int, where: str) -> str:
    text: str = _get(of, key, str, where)
    if not re.fullmatch(f"[0-9a-fA-F]{{{2 * num_bytes}}}", text):
        raise ConfigError(f"{where}.{key}: is not {num_bytes} bytes in hex")
    return text.lower()


def _time_ns(of: dict[str, Any], key: str, where: str) -> int:
    value = _int_value(of.get(key), f"{where}.{key}")
    if not 0 <= value < 1 << 64:
        raise ConfigError(f"{where}.{key}: is not a time in nanoseconds")
    return value


def _jaeger_spans(document: dict[str, Any], where: str) -> Iterator[RecordedSpan]:
    for trace, in_trace in _items(document, "data", where):
        processes = _get(trace, "processes", dict, in_trace, {})
        for span, at in _items(trace, "spans", f"{in_trace}."):
            process = _get(processes, _get(span, "processID", str, at), dict, f"{in_trace}.processes")
            yield _jaeger_span(span, process, at)


def _jaeger_span(span: dict[str, Any], process: dict[str, Any], where: str) -> RecordedSpan:
    tags = _tags(span, where)
    parents, links = _references(span, where)
    start_ns = 1000 * _int_value(span.get("startTime"), f"{where}.startTime")
    return _checked(
        RecordedSpan(
            name=_get(span, "operationName", str, where),
            trace_id=_id(span, "traceID", 16, where),
            span_id=_id(span, "spanID", 8, where),
            parent_id=parents[0].span_id if parents else "",
            start_ns=start_ns,
            end_ns=start_ns + 1000 * _int_value(span.get("duration"), f"{where}.duration"),
            attributes=tags,
            resource={"service.name": process.get("serviceName", ""), **_tags(process, where)},
            is_error=tags.get("error") is True,
            kind=_kind(tags.get("span.kind")),
            links=tuple(links),
            events=tuple(
                SpanEvent(str(fields.pop("event", "")), 1000 * _int_value(event.get("timestamp"), at), fields)
                for event, at in _items(span, "logs", f"{where}.")
                for fields in [_tags(event, at, "fields")]
            ),
        ),
        where,
    )


def _references(span: dict[str, Any], where: str) -> tuple[list[SpanLink], list[SpanLink]]:
    """Parents and links."""
    found: dict[object, list[SpanLink]] = {"CHILD_OF": [], "FOLLOWS_FROM": []}
    for reference, at in _items(span, "references", f"{where}."):
        of_kind = found.get(reference.get("refType"))
        if of_kind is not None:
            of_kind.append(SpanLink(_id(reference, "traceID", 16, at), _id(reference, "spanID", 8, at)))
    return found["CHILD_OF"], found["FOLLOWS_FROM"]


def _tags(of: dict[str, Any], where: str, name: str = "tags") -> dict[str, Value]:
    return {_get(tag, "key", str, at): tag.get("value") for tag, at in _items(of, name, f"{where}.")}


def save(path: Path, spans: Iterable[RecordedSpan]) -> None:
    """Write OTLP JSON lines, for `read`.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8") as out:
        for _, group in itertools.groupby(spans, attrgetter("resource")):
            for batch in _batches(group):
                out.write(json.dumps(_request(batch), allow_nan=False, separators=(",", ":")) + "\n")


def _batches(spans: Iterable[RecordedSpan]) -> Iterator[list[RecordedSpan]]:
    remaining = iter(spans)
    while batch := list(itertools.islice(remaining, _SPANS_A_LINE)):
        yield batch


def _request(spans: list[RecordedSpan]) -> dict[str, Any]:
    """One `ExportTraceServiceRequest` of spans that share a resource."""
    resource = {"attributes": _pairs(spans[0].resource)}
    scope = {"scope": {"name": "specwire"}, "spans": [_otlp(span) for span in spans]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def _otlp(span: RecordedSpan) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _pairs(span.attributes),
        "status": {"code": 2} if span.is_error else {},
        "links": [{"traceId": link.trace_id, "spanId": link.span_id} for link in span.links],
        "events": [
            {"name": event.name, "timeUnixNano": str(event.time_ns), "attributes": _pairs(event.attributes)}
            for event in span.events
        ],
    }


def _pairs(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _typed(value)} for key, value in values.items()]


def _typed(value: Value) -> dict[str, Any]:  # noqa: PLR0911
    match value:
        case None:
            return {}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float() if math.isfinite(value):
            return {"doubleValue": value}
        case float():
            return {"doubleValue": {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")}
        case str():
            return {"stringValue": value}
        case Mapping():
            return {"kvlistValue": {"values": _pairs(value)}}
        case _:
            return {"arrayValue": {"values": [_typed(item) for item in value]}}
