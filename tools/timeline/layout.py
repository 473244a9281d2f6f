"""Layout of the picture: bars in lanes, rounds with their marks. Pure.

Times are nanoseconds from the start of the `generate` span, by the coordinator's clock. What a stage took is
read from attributes, where the coordinator's ledger put it; only the places of bars come from times of spans.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from specwire.completion import Stage
from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tools.timeline.generation import (
    MODEL_CALLS,
    GenerationTrace,
    count,
    is_answered,
    is_failed,
    number,
    serving,
    text,
)
from tools.timeline.intervals import Interval, difference, intersection, length, union
from tools.timeline.spans import RecordedSpan

TOLERANCE_NS = 50_000
"""Offsets below this are noise of reading the clock rather than a difference of clocks."""
SHOWN_SHIFT_NS = 1_000_000


class BarKind(StrEnum):
    ROUND = "round"
    ADMISSION = "admission"
    OUTSIDE = "outside"
    """The coordinator's time outside of rounds, where a client's credit is waited for."""
    ACCEPT = "accept"
    EVENT = "event"
    DRAFT_QUEUE = "draft.queue"
    DRAFT_FORWARD = "draft.forward"
    DRAFT_HANDLING = "draft.handling"
    DRAFT_UNANSWERED = "draft.unanswered"
    DRAFT_PREPARE = "draft.prepare"
    VERIFY_QUEUE = "verify.queue"
    VERIFY_FORWARD = "verify.forward"
    VERIFY_HANDLING = "verify.handling"
    VERIFY_UNANSWERED = "verify.unanswered"
    """A request that its service did not answer, so that it says nothing about it."""
    NETWORK = "network"
    UNKNOWN = "unknown"
    """A call of the coordinator without a span of the service."""
    FAILED = "failed"
    """A call that failed, or was not answered in time."""


class Lane(StrEnum):
    """A lane of bars, from top to bottom."""

    COORDINATOR = "coordinator"
    DRAFT = "draft"
    VERIFY = "verify"
    NETWORK = "network"


class Mark(StrEnum):
    """Whether a round's proposal was prepared; plain and lost rounds have none."""

    HIT = "hit"
    BEGUN = "begun"
    MISS = "miss"
    LOST = "lost"
    PLAIN = "plain"


SIGNS = {Mark.HIT: "✓", Mark.BEGUN: "◐", Mark.MISS: "✗", Mark.LOST: "!", Mark.PLAIN: "–"}

_SECOND_ROW = (BarKind.ACCEPT, BarKind.EVENT, BarKind.DRAFT_PREPARE)
"""Beneath the others of their lane."""
_FINER = ("draft.queue", "draft.forward", "verify.queue", "verify.forward")
"""Spans of services with `--trace-detail` only."""
_DRAFTING, _VERIFYING = (BarKind.DRAFT_FORWARD, BarKind.DRAFT_PREPARE), (BarKind.VERIFY_FORWARD,)
_PARTS = {
    names.QUEUE_MS: "_queue",
    names.FORWARD_MS: "",
    names.HANDLING_MS: "",
    names.NETWORK_MS: "_network",
}
"""Attributes of a call, with what their stages' names have after `draft` or `verify`."""
ROUND_STAGES = tuple(Stage(role + part) for role in MODEL_CALLS for part in ("", "_queue", "_network"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An interval of work or waiting.

    Attributes:
        title: shown when the pointer is over it.
        label: drawn on it where it fits, and beside an event.
        row: within the lane, from 0; bars of one row do not overlap.
        span: source of its attributes; for the network the coordinator's call.
    """

    kind: BarKind
    title: str
    start_ns: int
    end_ns: int
    span: RecordedSpan
    label: str = ""
    row: int = 0

    @property
    def lane(self) -> Lane:
        role = self.kind.partition(".")[0]
        if role in MODEL_CALLS:
            return Lane(role)
        on_the_way = self.kind in (BarKind.NETWORK, BarKind.UNKNOWN, BarKind.FAILED)
        return Lane.NETWORK if on_the_way else Lane.COORDINATOR

    @property
    def interval(self) -> Interval:
        return self.start_ns, self.end_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """A round in numbers.

    Attributes:
        number: from 0.
        stages_ms: of `ROUND_STAGES`, as its calls say.
    """

    span_id: str
    number: int
    mark: Mark
    num_drafted: int
    num_accepted: int
    start_ns: int
    end_ns: int
    stages_ms: Mapping[Stage, float]

    @property
    def labels(self) -> list[str]:
        """From long to short: `7: hit ✓ 3/4` (accepted of drafted), `7 ✓ 3/4`, `✓ 3/4`, `3/4`."""
        counts = f"{self.num_accepted}/{self.num_drafted}"
        signed = f"{SIGNS[self.mark]} {counts}"
        return [f"{self.number}: {self.mark} {signed}", f"{self.number} {signed}", signed, counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything to draw.

    Attributes:
        stages_ms: of the whole generation, as its span says; those that took time.
        ahead_ms: what the draft computed before it was asked; None if unknown.
        bars: by start, including those of rounds.
        overlaps: times when target and draft compute at once.
        num_rows: of each lane.
        num_rounds: of the whole generation, of which `rounds` may be a part.
        num_tokens: emitted by the whole generation; None if unknown.
        notes: caveats for the reader.
    """

    model: str
    trace_id: str
    num_tokens: int | None
    total_ns: int
    stages_ms: Mapping[Stage, float]
    ahead_ms: float | None
    start_ns: int
    end_ns: int
    rounds: Sequence[RoundFigures]
    num_rounds: int
    bars: Sequence[Bar]
    overlaps: Sequence[Interval]
    num_rows: Mapping[Lane, int]
    notes: Sequence[str]

    @property
    def overlap_share(self) -> float:
        """Fraction of the time shown in which target and draft compute at once."""
        return length(list(self.overlaps)) / max(1, self.end_ns - self.start_ns)


def make(generation: GenerationTrace, numbers: range | None = None) -> Timeline:
    """Lay a generation out.

    Args:
        numbers: rounds to show; None for all.

    Raises:
        ConfigError: it has none of these rounds.
    """
    return _Builder(generation).make(numbers)


class _Builder:
    def __init__(self, generation: GenerationTrace) -> None:
        self.generation = generation
        self.root = generation.root
        self.children: dict[str, list[RecordedSpan]] = defaultdict(list)
        for span in generation.spans:
            self.children[span.parent_id].append(span)
        self.rounds = generation.named("round")
        self.numbers = {span.span_id: count(span, names.ROUND, i) for i, span in enumerate(self.rounds)}
        self.users = {link.span_id: self.numbers[one.span_id] for one in self.rounds for link in one.links}
        self.shifts = _shifts((call, self._served(call)) for call in generation.named(*MODEL_CALLS))

    def make(self, numbers: range | None) -> Timeline:
        bars = _in_rows(
            [bar for span in self.generation.spans for bar in self._bars(span) + self._events(span)]
            + self._outside()
        )
        rounds = sorted(map(self._round, self.rounds), key=lambda one: one.number)
        shown = rounds if numbers is None else [one for one in rounds if one.number in numbers]
        if numbers is not None and not shown:
            there = f"rounds {rounds[0].number} to {rounds[-1].number}" if rounds else "no rounds"
            raise ConfigError(f"--rounds {numbers.start}:{numbers.stop}: there are {there}")
        start_ns, end_ns = 0, self.root.duration_ns
        if len(shown) < len(rounds):
            start_ns, end_ns = min(one.start_ns for one in shown), max(one.end_ns for one in shown)
        visible = [bar for bar in bars if bar.end_ns >= start_ns and bar.start_ns <= end_ns]
        busy = [[b.interval for b in visible if b.kind in kinds] for kinds in (_DRAFTING, _VERIFYING)]
        return Timeline(
            model=text(self.root, names.GEN_AI_REQUEST_MODEL),
            trace_id=self.root.trace_id,
            num_tokens=count(self.root, names.GEN_AI_USAGE_OUTPUT_TOKENS) or None,
            total_ns=self.root.duration_ns,
            stages_ms=_stages_of(self.root),
            ahead_ms=number(self.root, names.AHEAD_MS),
            start_ns=start_ns,
            end_ns=end_ns,
            rounds=shown,
            num_rounds=len(rounds),
            bars=visible,
            overlaps=intersection([(start_ns, end_ns)], intersection(*map(union, busy))),
            num_rows={lane: 1 + max((b.row for b in visible if b.lane is lane), default=0) for lane in Lane},
            notes=self._notes(bars),
        )

    def _served(self, call: RecordedSpan) -> list[RecordedSpan]:
        return [span for span in self.children[call.span_id] if span.name == serving(call.name)]

    def _bars(self, span: RecordedSpan) -> list[Bar]:
        if span.name in MODEL_CALLS:
            return self._call(span)
        if span.name in map(serving, MODEL_CALLS):
            return self._serve(span)
        if span.name == BarKind.DRAFT_PREPARE:
            user = self.users.get(span.span_id)
            title = f"{span.name}, not used" if user is None else f"{span.name}, used by round {user}"
            label = "" if user is None else f"→ {user}"
            return [self._bar(BarKind.DRAFT_PREPARE, title, self._interval(span), span, label=label)]
        if span.name in ("round", "admission", "accept", *_FINER):
            return [self._bar(BarKind(span.name), span.name, self._interval(span), span)]
        return []

    def _events(self, span: RecordedSpan) -> list[Bar]:
        found = []
        for event in span.events:
            at_ns = event.time_ns + self._offset_ns(span)
            reason = event.attributes.get(names.ERROR_TYPE)
            title = f"{event.name}: {reason}" if isinstance(reason, str) else event.name
            found.append(self._bar(BarKind.EVENT, title, (at_ns, at_ns), span, label=event.name))
        return found

    def _call(self, call: RecordedSpan) -> list[Bar]:
        """All of it if it failed; else its parts outside of the service's own span."""
        interval = self._interval(call)
        if not is_answered(call):
            why = f"{call.name}: no answer in time"
            if is_failed(call):
                address = text(call, names.SERVER_ADDRESS)
                why = f"{call.name} failed: {text(call, names.ERROR_TYPE) or 'error'}"
                why += f", at {address}" if address else ""
            return [self._bar(BarKind.FAILED, why, interval, call, label="✗")]
        parts = self._served(call)
        if not parts:
            return [self._bar(BarKind.UNKNOWN, f"{call.name}, no span of the service", interval, call)]
        served = union(map(self._residence, parts))  # none if the answer was on its way before
        left = difference([interval], served)
        return [self._bar(BarKind.NETWORK, _way(call, gap, served), gap, call) for gap in left]

    def _serve(self, serve: RecordedSpan) -> list[Bar]:
        """A request at its service: queue, passes and handling in this order, or as finer spans say."""
        role = serve.name.partition(".")[0]
        whole = start_ns, end_ns = self._residence(serve)
        spent_ms = _parts_ms(serve)
        if spent_ms is None:
            title = f"{serve.name}, not answered"
            return [self._bar(BarKind(f"{role}.unanswered"), title, whole, serve)]
        finer = [self._interval(span) for span in self.children[serve.span_id] if span.name in _FINER]
        if finer:
            left = difference([whole], union(finer))
            return [self._bar(BarKind(f"{role}.handling"), f"{role}.handling", gap, serve) for gap in left]
        bars = []
        for part, part_ms in zip(("queue", "forward", "handling"), spent_ms, strict=True):
            until_ns = min(start_ns + round(part_ms * 1e6), end_ns)
            bars.append(self._bar(BarKind(f"{role}.{part}"), f"{role}.{part}", (start_ns, until_ns), serve))
            start_ns = until_ns
        return [bar for bar in bars if bar.start_ns < bar.end_ns]

    def _outside(self) -> list[Bar]:
        """Time of the coordinator outside of admission and rounds."""
        whole = self._interval(self.root)
        known = union(map(self._interval, self.generation.named("admission", "round")))
        title = "outside of rounds: emit, client_credit, coordinator"
        return [
            self._bar(BarKind.OUTSIDE, title, gap, self.root)
            for gap in difference([whole], known)
            if gap[1] - gap[0] > TOLERANCE_NS
        ]

    def _bar(self, kind: BarKind, title: str, at: Interval, span: RecordedSpan, label: str = "") -> Bar:
        return Bar(kind=kind, title=title, start_ns=at[0], end_ns=at[1], span=span, label=label)

    def _residence(self, serve: RecordedSpan) -> Interval:
        offset_ns = self._offset_ns(serve)
        start_ns, end_ns = _residence(serve)
        return start_ns + offset_ns, end_ns + offset_ns

    def _offset_ns(self, span: RecordedSpan) -> int:
        return (self.shifts.get(_clock(span), 0) if self.shifts else 0) - self.root.start_ns

    def _interval(self, span: RecordedSpan) -> Interval:
        offset_ns = self._offset_ns(span)
        return span.start_ns + offset_ns, span.end_ns + offset_ns

    def _round(self, span: RecordedSpan) -> RoundFigures:
        start_ns, end_ns = self._interval(span)
        stages_ms = dict.fromkeys(ROUND_STAGES, 0.0)
        for call in self.children[span.span_id]:
            if call.name in MODEL_CALLS:
                for name, part in _PARTS.items():
                    stages_ms[Stage(call.name + part)] += number(call, name) or 0.0
        return RoundFigures(
            span_id=span.span_id,
            number=self.numbers[span.span_id],
            mark=mark(span),
            num_drafted=count(span, names.NUM_DRAFT_TOKENS),
            num_accepted=count(span, names.NUM_ACCEPTED_TOKENS),
            start_ns=start_ns,
            end_ns=end_ns,
            stages_ms=stages_ms,
        )

    def _notes(self, bars: Sequence[Bar]) -> list[str]:
        notes = [
            f"The clock of the {role} service differs: its spans are moved by {shift_ns / 1e6:+.1f} ms"
            for (role, _), shift_ns in self.shifts.items()
            if abs(shift_ns) > SHOWN_SHIFT_NS
        ]
        if not _stages_of(self.root):
            notes.append("The span generate says no stages: it is not of this version, or not of its end")
        num_unknown = sum(bar.kind is BarKind.UNKNOWN for bar in bars)
        found = {
            "calls have no span of the service they went to": num_unknown,
            "spans are left out: their parents are missing": self.generation.num_lost,
            "rounds are missing from the trace": count(self.root, names.NUM_ROUNDS) - len(self.rounds),
        }
        return notes + [f"{num} {what}" for what, num in found.items() if num > 0]


def mark(span: RecordedSpan) -> Mark:
    outcome = text(span, names.CALL_OUTCOME)
    if not count(span, names.NUM_DRAFT_TOKENS):
        return Mark.LOST if outcome in ("timed_out", "unavailable", "lost") else Mark.PLAIN
    if span.attributes.get(names.DRAFT_PREPARED) is True:
        return Mark.HIT
    return Mark.BEGUN if outcome == "begun" else Mark.MISS


def _stages_of(root: RecordedSpan) -> dict[Stage, float]:
    found = {stage: number(root, names.stage_attribute(stage)) for stage in Stage}
    return {stage: spent_ms for stage, spent_ms in found.items() if spent_ms}


def _parts_ms(serve: RecordedSpan) -> list[float] | None:
    """Queue, passes and handling of a request at its service; None if it was not answered."""
    found = [number(serve, name) for name in (names.QUEUE_MS, names.FORWARD_MS, names.HANDLING_MS)]
    parts_ms = [part_ms for part_ms in found if part_ms is not None]
    return parts_ms if len(parts_ms) == len(found) else None


def _residence(serve: RecordedSpan) -> Interval:
    """From the request's arrival until its answer is written, for which the span goes on; without an answer
    all of the span."""
    parts_ms = _parts_ms(serve)
    if parts_ms is None:
        return serve.start_ns, serve.end_ns
    return serve.start_ns, min(serve.start_ns + round(sum(parts_ms) * 1e6), serve.end_ns)


def _way(call: RecordedSpan, gap: Interval, served: Sequence[Interval]) -> str:
    if text(call, names.CALL_OUTCOME) == "begun":
        return f"network, answer of {call.name}, begun ahead"
    if not served or gap[1] <= served[0][0]:
        return f"network, request to {call.name}"
    return f"network, answer of {call.name}" if gap[0] >= served[-1][1] else f"network, {call.name}"


def _clock(span: RecordedSpan) -> tuple[str, str]:
    """Role and process: all spans of a process share a clock. The coordinator's is the reference."""
    role, dot, _ = span.name.partition(".")
    return (role, repr(sorted(span.resource.items()))) if dot else ("", "")


def _shifts(calls: Iterable[tuple[RecordedSpan, Sequence[RecordedSpan]]]) -> dict[tuple[str, str], int]:
    """Nanoseconds to add to each service's times, for services with spans that exceed the calls to them.

    As in NTP, a call and the service's spans are assumed to have the same midpoint: the shift is the median
    over all calls, clamped so that every call contains its spans, where possible.
    """
    by_clock: dict[tuple[str, str], list[tuple[RecordedSpan, Interval]]] = defaultdict(list)
    for call, parts in calls:
        if text(call, names.CALL_OUTCOME) == "begun":
            continue  # its answer was on the way before its request arrived
        served = union(map(_residence, parts))
        if served and served[-1][1] - served[0][0] <= call.duration_ns:
            by_clock[_clock(parts[0])].append((call, (served[0][0], served[-1][1])))
    return {clock: shift for clock, found in by_clock.items() if (shift := _shift(found))}


def _shift(calls: Sequence[tuple[RecordedSpan, Interval]]) -> int:
    least = max(call.start_ns - start for call, (start, _) in calls)
    most = min(call.end_ns - end for call, (_, end) in calls)
    if least <= TOLERANCE_NS and most >= -TOLERANCE_NS:
        return 0
    middles = [(call.start_ns + call.end_ns - start - end) // 2 for call, (start, end) in calls]
    middle = statistics.median_low(middles)
    return max(least, min(middle, most)) if least <= most else middle


def _in_rows(bars: Iterable[Bar]) -> list[Bar]:
    """Bars by start, on rows: one or two for a lane, and more where bars of a row would overlap."""
    groups: dict[Lane, tuple[list[Bar], list[Bar]]] = {lane: ([], []) for lane in Lane}
    for bar in bars:
        groups[bar.lane][bar.kind in _SECOND_ROW].append(bar)
    placed: list[Bar] = []
    for upper, lower in groups.values():
        packed = _packed(upper)
        below = 1 + max((bar.row for bar in packed), default=-1)
        placed += packed + [replace(bar, row=below + bar.row) for bar in _packed(lower)]
    return sorted(placed, key=lambda bar: (bar.start_ns, bar.end_ns))


def _packed(bars: Sequence[Bar]) -> list[Bar]:
    """Each bar on the first free row, up to the tolerance of clocks."""
    ends: list[int] = []
    placed = []
    for bar in sorted(bars, key=lambda bar: bar.interval):
        row = 0
        while row < len(ends) and ends[row] > bar.start_ns + TOLERANCE_NS:
            row += 1
        ends[row:] = [bar.end_ns, *ends[row + 1 :]]
        placed.append(replace(bar, row=row))
    return placed
