"""Traces of generations that never ran, for what reads and draws them."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from specwire.completion import Stage
from specwire.telemetry import semantics as names
from tools.timeline import layout
from tools.timeline.generation import choose
from tools.timeline.spans import RecordedSpan, SpanEvent, SpanLink

MS = 1_000_000
START_NS = 1_700_000_000 * 10**9
TRACE = "ab" * 16


class Trace:
    """Spans by hand; times in milliseconds from the start of the generation."""

    def __init__(self, trace_id: str = TRACE) -> None:
        self.spans: list[RecordedSpan] = []
        self._trace_id = trace_id

    def add(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        parent: str = "",
        *,
        links: Sequence[str] = (),
        events: Mapping[str, float] = MappingProxyType({}),
        error: str = "",
        **attributes: Any,
    ) -> str:
        """Returns its id.

        Args:
            links: ids of spans of this trace.
            events: names with their times.
            attributes: in specwire's namespace, with `__` for a dot.
        """
        span_id = f"{len(self.spans) + 1:016x}"
        role = name.partition(".")[0] if "." in name else "coordinator"
        named = {f"specwire.{key.replace('__', '.')}": value for key, value in attributes.items()}
        self.spans.append(
            RecordedSpan(
                name=name,
                trace_id=self._trace_id,
                span_id=span_id,
                parent_id=parent,
                start_ns=START_NS + round(start_ms * MS),
                end_ns=START_NS + round(end_ms * MS),
                attributes=named | ({names.ERROR_TYPE: error} if error else {}),
                resource={"service.name": f"specwire-{role}"},
                is_error=bool(error),
                links=tuple(SpanLink(self._trace_id, link) for link in links),
                events=tuple(
                    SpanEvent(event, START_NS + round(at_ms * MS), {}) for event, at_ms in events.items()
                ),
            )
        )
        return span_id

    def call(
        self,
        role: str,
        interval_ms: tuple[float, float],
        parent: str,
        *,
        received_ms: float,
        queue_ms: float = 0.0,
        forward_ms: float,
        handling_ms: float = 0.0,
        clock_ms: float = 0.0,
    ) -> str:
        """A call that is answered, and its service's span; returns the id of the latter.

        Args:
            received_ms: when the request was at the service.
            clock_ms: what the service's clock is ahead of the coordinator's.
        """
        spent: dict[str, Any] = {"queue_ms": queue_ms, "forward_ms": forward_ms, "handling_ms": handling_ms}
        residence_ms = queue_ms + forward_ms + handling_ms
        network_ms = interval_ms[1] - interval_ms[0] - residence_ms
        call = self.add(role, *interval_ms, parent, network_ms=network_ms, outcome="asked", **spent)
        start_ms = clock_ms + received_ms
        return self.add(f"{role}.serve", start_ms, start_ms + residence_ms, call, batch_size=1, **spent)


def three_rounds(draft_clock_ms: float = 0, model: str = "target") -> list[RecordedSpan]:
    """100 ms: a miss from 0 to 50, a hit from 50 to 80, a plain round from 80 to 100.

    Draft: 5 to 15 on request; 20 to 40 prepared for the hit, and 52 to 62 for no round. Target: 22 to 46,
    51 to 78, 81 to 98.
    """
    trace, off = Trace(), draft_clock_ms
    root = trace.add("generate", 0, 100, num_rounds=3, ahead_ms=18.0)
    miss = trace.add("round", 0, 50, root, num_draft_tokens=4, num_accepted_tokens=2, base_len=9)
    trace.call("draft", (0, 20), miss, received_ms=4, queue_ms=1, forward_ms=10, clock_ms=off)
    trace.call("verify", (20, 48), miss, received_ms=21, queue_ms=1, forward_ms=24, handling_ms=1)
    trace.add("accept", 48, 49, miss)
    used = trace.add("draft.prepare", off + 20, off + 40, root, base_len=13, num_outcomes=6)
    hit = trace.add(
        "round",
        *(50, 80, root),
        links=[used],
        num_draft_tokens=4,
        num_accepted_tokens=4,
        draft__prepared=True,
        base_len=13,
    )
    trace.call("verify", (50, 79), hit, received_ms=51, forward_ms=27)
    trace.add("draft.prepare", off + 52, off + 62, root, base_len=17, num_outcomes=6)
    plain = trace.add("round", 80, 100, root, num_draft_tokens=0, num_accepted_tokens=0)
    trace.call("verify", (80, 99), plain, received_ms=81, forward_ms=17)
    spent_ms = {
        Stage.DRAFT: 10.0,
        Stage.DRAFT_QUEUE: 1.0,
        Stage.DRAFT_NETWORK: 9.0,
        Stage.VERIFY: 69.0,
        Stage.VERIFY_QUEUE: 1.0,
        Stage.VERIFY_NETWORK: 6.0,
        Stage.RULE: 1.0,
        Stage.COORDINATOR: 3.0,
    }
    attributes = {
        **trace.spans[0].attributes,
        names.GEN_AI_REQUEST_MODEL: model,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: 9,
        **{names.stage_attribute(stage): ms for stage, ms in spent_ms.items()},
    }
    trace.spans[0] = dataclasses.replace(trace.spans[0], attributes=attributes)
    return trace.spans


def laid_out(spans: list[RecordedSpan], numbers: range | None = None) -> layout.Timeline:
    return layout.make(choose(spans), numbers)


def saved(path: Path, spans: Iterable[RecordedSpan]) -> Path:
    """Written as the collector's file exporter does, one message a line."""
    path.write_text("".join(f"{json.dumps(_request(span))}\n" for span in spans))
    return path


def exported(span: RecordedSpan) -> ExportTraceServiceRequest:
    """As it is sent over gRPC: ids are bytes, which protobuf's own JSON has in base 64."""
    found = _request(span, lambda name: base64.b64encode(bytes.fromhex(name)).decode())
    return json_format.ParseDict(found, ExportTraceServiceRequest())


def _request(span: RecordedSpan, spelt: Callable[[str], str] = str) -> dict[str, Any]:
    found = {
        "traceId": spelt(span.trace_id),
        "spanId": spelt(span.span_id),
        "parentSpanId": spelt(span.parent_id),
        "name": span.name,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _pairs(span.attributes),
        "links": [{"traceId": spelt(link.trace_id), "spanId": spelt(link.span_id)} for link in span.links],
    }
    return {
        "resourceSpans": [
            {"resource": {"attributes": _pairs(span.resource)}, "scopeSpans": [{"spans": [found]}]}
        ]
    }


def _pairs(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {_KEYS[type(value)]: value}} for key, value in values.items()]


_KEYS = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
