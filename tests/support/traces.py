"""Traces of generations that never ran, for what reads and draws them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specwire.cli.timeline import layout
from specwire.cli.timeline.generation import choose
from specwire.cli.timeline.spans import RecordedSpan, save
from specwire.telemetry import tracing

MS = 1_000_000
START_NS = 1_700_000_000 * 10**9
TRACE = "ab" * 16


class Trace:
    """Spans by hand; times in milliseconds from the start of the generation."""

    def __init__(self, trace_id: str = TRACE) -> None:
        self.spans: list[RecordedSpan] = []
        self._trace_id = trace_id

    def add(self, name: str, start_ms: float, end_ms: float, parent: str = "", **attributes: Any) -> str:
        span_id = f"{len(self.spans) + 1:016x}"
        role = name.partition(".")[0] if "." in name else "coordinator"
        self.spans.append(
            RecordedSpan(
                name=name,
                trace_id=self._trace_id,
                span_id=span_id,
                parent_id=parent,
                start_ns=START_NS + round(start_ms * MS),
                end_ns=START_NS + round(end_ms * MS),
                attributes={f"specwire.{key.replace('__', '.')}": value for key, value in attributes.items()},
                resource={"service.name": f"specwire-{role}"},
            )
        )
        return span_id


def three_rounds(draft_clock_ms: float = 0, model: str = "target") -> list[RecordedSpan]:
    """100 ms: a miss from 0 to 50, a hit from 50 to 80, a plain round from 80 to 100.

    draft: 5 to 15 on request; 20 to 40 and 52 to 62 prepared. Target: 22 to 47, 51 to 78, 81 to 98.
    """
    trace, off = Trace(), draft_clock_ms
    root = trace.add("generate", 0, 100, num_rounds=3)
    miss = trace.add("round", 0, 50, root, num_draft_tokens=4, num_accepted_tokens=2, base_len=9)
    draft = trace.add("draft", 0, 20, miss)
    trace.add("draft.queue", off + 4, off + 5, draft)
    trace.add("draft.forward", off + 5, off + 15, draft)
    verify = trace.add("verify", 20, 48, miss)
    trace.add("verify.queue", 21, 22, verify)
    trace.add("verify.forward", 22, 47, verify, batch_size=1)
    trace.add("draft.prepare", off + 20, off + 40, miss, base_len=13, num_outcomes=6)
    trace.add("accept", 48, 49, miss)
    hit = trace.add(
        "round", 50, 80, root, num_draft_tokens=4, num_accepted_tokens=4, draft__prepared=True, base_len=13
    )
    trace.add("draft", 50, 50, hit)
    verify = trace.add("verify", 50, 79, hit)
    trace.add("verify.forward", 51, 78, verify)
    trace.add("draft.prepare", off + 52, off + 62, hit, base_len=17, num_outcomes=6)
    plain = trace.add("round", 80, 100, root, num_draft_tokens=0, num_accepted_tokens=0)
    verify = trace.add("verify", 80, 99, plain)
    trace.add("verify.forward", 81, 98, verify)
    named: dict[str, Any] = {tracing.GEN_AI_REQUEST_MODEL: model, tracing.GEN_AI_USAGE_OUTPUT_TOKENS: 9}
    trace.spans[0] = dataclasses.replace(trace.spans[0], attributes={**trace.spans[0].attributes, **named})
    return trace.spans


def laid_out(spans: list[RecordedSpan], numbers: range | None = None) -> layout.Timeline:
    return layout.make(choose(spans), numbers)


def saved(path: Path, spans: list[RecordedSpan]) -> Path:
    save(path, spans)
    return path
