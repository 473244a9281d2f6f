"""The spans of one generation: its `generate` span and all descendants."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tools.timeline.spans import RecordedSpan

MODEL_CALLS = ("draft", "verify")
"""The coordinator's spans around calls of the model services, one for each attempt."""
_BENEATH = ("admission", "round", *MODEL_CALLS, "draft.prepare", "draft.serve", "verify.serve")
"""Names of spans that descend from `generate`; a trace also has those of its callers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTrace:
    """One `generate` span and its descendants.

    Attributes:
        num_lost: spans of the trace whose parents are missing.
    """

    root: RecordedSpan
    spans: Sequence[RecordedSpan]
    num_lost: int = 0

    def named(self, *names: str) -> list[RecordedSpan]:
        """Spans of these names, by start."""
        return sorted((span for span in self.spans if span.name in names), key=lambda span: span.start_ns)


def generations(spans: Iterable[RecordedSpan]) -> list[GenerationTrace]:
    """The generations, by start."""
    by_trace: dict[str, dict[str, RecordedSpan]] = defaultdict(dict)
    for span in spans:
        by_trace[span.trace_id][span.span_id] = span  # a retry after a timeout may deliver it twice
    found = [made for of_trace in by_trace.values() for made in _generations(of_trace)]
    return sorted(found, key=lambda generation: generation.root.start_ns)


def _generations(of_trace: Mapping[str, RecordedSpan]) -> Iterator[GenerationTrace]:
    children: dict[str, list[RecordedSpan]] = defaultdict(list)
    for span in of_trace.values():
        children[span.parent_id].append(span)
    roots = [span for span in of_trace.values() if span.name == names.GENERATE]
    lost = [span for span in of_trace.values() if span.name in _BENEATH and span.parent_id not in of_trace]
    for root in roots:
        num_lost = len(lost) if len(roots) == 1 else 0
        yield GenerationTrace(root=root, spans=_descendants(root, children), num_lost=num_lost)


def _descendants(root: RecordedSpan, children: Mapping[str, Sequence[RecordedSpan]]) -> list[RecordedSpan]:
    found, seen = [root], {root.span_id}  # ids are untrusted and may form a cycle
    for span in found:
        below = [child for child in children.get(span.span_id, ()) if child.span_id not in seen]
        seen.update(child.span_id for child in below)
        found += below
    return found


def choose(spans: Iterable[RecordedSpan], trace_id: str = "") -> GenerationTrace:
    """The only generation, or that of a trace.

    Args:
        trace_id: hex; or the span id of a generation, where a trace has several.

    Raises:
        ConfigError: none matches, or several; lists them.
    """
    found = generations(spans)
    if not found:
        raise ConfigError("no generate span: this is no trace of a whole generation of specwire")
    wanted = trace_id.lower()
    fitting = [one for one in found if wanted in ("", one.root.trace_id, one.root.span_id)]
    if len(fitting) == 1:
        return fitting[0]
    problem = "choose one with --trace-id" if fitting else f"--trace-id {trace_id}: is not among them"
    listed = []
    for one in fitting or found:
        others = f" span {one.root.span_id}" if one.root.parent_id else ""
        figures = f"{one.root.duration_ns / 1e6:.1f} ms, {len(one.named('round'))} rounds"
        listed.append(f"{one.root.trace_id}{others} ({figures})")
    raise ConfigError(f"{problem}: {', '.join(listed)}")


def is_complete(generation: GenerationTrace) -> bool:
    """Whether all calls of all rounds have the spans of their services, which are exported independently."""
    rounds = generation.named("round")
    if len(rounds) < count(generation.root, names.NUM_ROUNDS):
        return False
    served = {span.parent_id for span in generation.named(*map(serving, MODEL_CALLS))}
    answered = [call for call in generation.named(*MODEL_CALLS) if is_answered(call)]
    verified = {call.parent_id for call in answered if call.name == "verify"}
    return all(call.span_id in served for call in answered) and all(
        one.span_id in verified for one in rounds if not is_failed(one)
    )


def serving(call: str) -> str:
    """Name of the service's span around a request of a `draft` or `verify` call."""
    return f"{call}.serve"


def is_failed(span: RecordedSpan) -> bool:
    """Whether an error or a cancel ended it."""
    return span.is_error or names.ERROR_TYPE in span.attributes


def is_answered(call: RecordedSpan) -> bool:
    """Whether the service answered a call in time."""
    return not is_failed(call) and text(call, names.CALL_OUTCOME) != "timed_out"


def count(span: RecordedSpan, name: str, default: int = 0) -> int:
    """A count in an attribute, or the default, as spans are untrusted."""
    value = span.attributes.get(name)
    return value if type(value) is int and value >= 0 else default


def text(span: RecordedSpan, name: str) -> str:
    value = span.attributes.get(name)
    return value if isinstance(value, str) else ""


def number(span: RecordedSpan, name: str) -> float | None:
    """A number in an attribute that is no less than 0; None without one."""
    value = span.attributes.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)
