"""The spans of one generation: its `generate` span and all descendants, by one clock."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tools.timeline.intervals import Interval, union
from tools.timeline.spans import RecordedSpan

MODEL_CALLS = ("draft", "verify")
"""The coordinator's spans around calls of the model services, one for each attempt."""
SERVES = tuple(f"{call}.serve" for call in MODEL_CALLS)
"""The services' spans around the requests of these."""
TOLERANCE_NS = 50_000
"""Offsets below this are noise of reading the clock rather than a difference of clocks."""
_BENEATH = ("admission", "round", "draft.prepare", *MODEL_CALLS, *SERVES)
"""Names of spans that descend from `generate`; a trace also has those of its callers."""
_SERVED_MS = (names.QUEUE_MS, names.FORWARD_MS, names.HANDLING_MS)
Clock = tuple[str, str]
"""Role and process: all spans of a process share a clock."""


@dataclass(frozen=True, kw_only=True)
class GenerationTrace:
    """One `generate` span and its descendants.

    Attributes:
        spans: that of `generate` first.
        num_lost: spans of the trace whose parents are missing.
    """

    spans: Sequence[RecordedSpan]
    num_lost: int = 0

    @property
    def root(self) -> RecordedSpan:
        return self.spans[0]

    @cached_property
    def children(self) -> Mapping[str, list[RecordedSpan]]:
        """By the id of their parent, which may have none."""
        return _by_parent(self.spans)

    def named(self, *names: str) -> list[RecordedSpan]:
        """Spans of these names, by start."""
        return sorted((span for span in self.spans if span.name in names), key=lambda span: span.start_ns)

    def served(self, call: RecordedSpan) -> list[RecordedSpan]:
        """Spans of the service that a call went to."""
        return [span for span in self.children[call.span_id] if span.name == f"{call.name}.serve"]


def generations(spans: Iterable[RecordedSpan]) -> list[GenerationTrace]:
    """The generations, by start."""
    by_trace: dict[str, dict[str, RecordedSpan]] = defaultdict(dict)
    for span in spans:
        by_trace[span.trace_id][span.span_id] = span  # a retry after a timeout may deliver it twice
    found = []
    for of_trace in by_trace.values():
        children = _by_parent(of_trace.values())
        roots = [span for span in of_trace.values() if span.name == names.GENERATE]
        lost = [
            span for span in of_trace.values() if span.name in _BENEATH and span.parent_id not in of_trace
        ]
        for root in roots:
            num_lost = len(lost) if len(roots) == 1 else 0
            found.append(GenerationTrace(spans=_with_descendants(root, children), num_lost=num_lost))
    return sorted(found, key=lambda generation: generation.root.start_ns)


def _by_parent(spans: Iterable[RecordedSpan]) -> Mapping[str, list[RecordedSpan]]:
    children: dict[str, list[RecordedSpan]] = defaultdict(list)
    for span in spans:
        children[span.parent_id].append(span)
    return children


def _with_descendants(
    root: RecordedSpan, children: Mapping[str, Sequence[RecordedSpan]]
) -> list[RecordedSpan]:
    found, seen = [root], {root.span_id}  # ids are untrusted and may form a cycle
    for span in found:
        below = [child for child in children[span.span_id] if child.span_id not in seen]
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
    """Whether all calls of all rounds have the spans of their services, which are exported independently.

    The last call may have none where its work was begun before: its sequence is closed as it arrives.
    """
    rounds = generation.named("round")
    answered = [call for call in generation.named(*MODEL_CALLS) if is_answered(call)]
    verified = {call.parent_id for call in answered if call.name == "verify"}
    ends_begun = bool(answered) and answered[-1].text(names.CALL_OUTCOME) == "begun"
    return (
        len(rounds) >= generation.root.count(names.NUM_ROUNDS)
        and all(map(generation.served, answered[:-1] if ends_begun else answered))
        and all(one.span_id in verified for one in rounds if not one.is_failed)
    )


def is_answered(call: RecordedSpan) -> bool:
    """Whether the service answered a call in time."""
    return not call.is_failed and call.text(names.CALL_OUTCOME) != "timed_out"


def served_ms(serve: RecordedSpan) -> list[float] | None:
    """Queue, passes and handling of a request at its service; None if it was not answered."""
    parts_ms = [part_ms for name in _SERVED_MS if (part_ms := serve.number(name)) is not None]
    return parts_ms if len(parts_ms) == len(_SERVED_MS) else None


def residence(serve: RecordedSpan) -> Interval:
    """From the request's arrival until its answer is written, for which the span goes on; without an answer
    all of the span."""
    parts_ms = served_ms(serve)
    if parts_ms is None:
        return serve.interval
    return serve.start_ns, min(serve.start_ns + round(sum(parts_ms) * 1e6), serve.end_ns)


def by_one_clock(generation: GenerationTrace) -> tuple[GenerationTrace, dict[Clock, int]]:
    """The generation with times since its start by the coordinator's clock, and the nanoseconds that those of
    services were moved by whose spans exceed the calls to them.

    As in NTP, a call and the service's spans are assumed to have the same midpoint: the shift is the median
    over all calls, clamped so that every call contains its spans, where possible.
    """
    calls: dict[Clock, list[tuple[Interval, Interval]]] = defaultdict(list)
    for call in generation.named(*MODEL_CALLS):
        if call.text(names.CALL_OUTCOME) == "begun":
            continue  # its answer was on the way before its request arrived
        parts = generation.served(call)
        served = union(map(residence, parts))
        if served and served[-1][1] - served[0][0] <= call.duration_ns:
            calls[_clock(parts[0])].append((call.interval, (served[0][0], served[-1][1])))
    shifts = {clock: shift for clock, found in calls.items() if (shift := _shift(found))}

    def moved(span: RecordedSpan) -> RecordedSpan:
        offset_ns = shifts.get(_clock(span), 0) - generation.root.start_ns
        events = [event._replace(time_ns=event.time_ns + offset_ns) for event in span.events]
        start_ns, end_ns = span.start_ns + offset_ns, span.end_ns + offset_ns
        return replace(span, start_ns=start_ns, end_ns=end_ns, events=events)

    return replace(generation, spans=[*map(moved, generation.spans)]), shifts


def _clock(span: RecordedSpan) -> Clock:
    role, dot, _ = span.name.partition(".")
    return (role, repr(sorted(span.resource.items()))) if dot else ("", "")


def _shift(calls: Sequence[tuple[Interval, Interval]]) -> int:
    """Of a service, by the intervals of calls and of their spans there."""
    least = max(call[0] - served[0] for call, served in calls)
    most = min(call[1] - served[1] for call, served in calls)
    if least <= TOLERANCE_NS and most >= -TOLERANCE_NS:
        return 0
    middle = statistics.median_low((sum(call) - sum(served)) // 2 for call, served in calls)
    return max(least, min(middle, most)) if least <= most else middle
