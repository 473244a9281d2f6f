"""Layout of the picture: bars in lanes, rounds with their marks, shares of time. Pure.

Times are nanoseconds from the start of the `generate` span, by the coordinator's clock.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from specwire.cli.timeline.generation import (
    MODEL_CALLS,
    GenerationTrace,
    count,
    has_prepared,
    is_prepared,
    text,
)
from specwire.cli.timeline.intervals import Interval, difference, intersection, length, union
from specwire.cli.timeline.spans import RecordedSpan
from specwire.errors import ConfigError
from specwire.telemetry import tracing

TOLERANCE_NS = 50_000
"""Offsets below this are noise of reading the clock rather than a difference of clocks."""
SHOWN_SHIFT_NS = 1_000_000


class BarKind(StrEnum):
    """What a bar represents."""

    ROUND = "round"
    ACCEPT = "accept"
    DRAFT_QUEUE = "draft.queue"
    DRAFT_FORWARD = "draft.forward"
    DRAFT_PREPARE = "draft.prepare"
    VERIFY_QUEUE = "verify.queue"
    VERIFY_FORWARD = "verify.forward"
    NETWORK = "network"
    UNKNOWN = "unknown"
    """A call of the coordinator without a span of the service, as for prepared proposals."""


class Lane(StrEnum):
    """A lane of bars, from top to bottom."""

    COORDINATOR = "coordinator"
    DRAFT = "draft"
    VERIFY = "verify"
    NETWORK = "network"


class Mark(StrEnum):
    """Whether a round's proposal was prepared; plain rounds have none."""

    HIT = "hit"
    MISS = "miss"
    PLAIN = "plain"


SIGNS = {Mark.HIT: "✓", Mark.MISS: "✗", Mark.PLAIN: "–"}

#: The lane of each kind and its row there, before empty rows are removed.
_PLACES = {
    BarKind.ROUND: (Lane.COORDINATOR, 0),
    BarKind.ACCEPT: (Lane.COORDINATOR, 1),
    BarKind.DRAFT_QUEUE: (Lane.DRAFT, 0),
    BarKind.DRAFT_FORWARD: (Lane.DRAFT, 0),
    BarKind.DRAFT_PREPARE: (Lane.DRAFT, 1),
    BarKind.VERIFY_QUEUE: (Lane.VERIFY, 0),
    BarKind.VERIFY_FORWARD: (Lane.VERIFY, 0),
    BarKind.NETWORK: (Lane.NETWORK, 0),
    BarKind.UNKNOWN: (Lane.NETWORK, 0),
}
_DRAFTING = (BarKind.DRAFT_FORWARD, BarKind.DRAFT_PREPARE)
_SERVING = (*_DRAFTING, BarKind.DRAFT_QUEUE, BarKind.VERIFY_QUEUE, BarKind.VERIFY_FORWARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An interval of work or waiting.

    Attributes:
        title: shown when the pointer is over it.
        row: within the lane, from 0; bars of one row do not overlap.
        span: source of its attributes; for the network the coordinator's call.
        round_id: span id of its round; empty for none.
    """

    kind: BarKind
    title: str
    start_ns: int
    end_ns: int
    span: RecordedSpan
    round_id: str
    row: int = 0

    @property
    def lane(self) -> Lane:
        """Where it is drawn."""
        return _PLACES[self.kind][0]

    @property
    def interval(self) -> Interval:
        """Start and end."""
        return self.start_ns, self.end_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """A round in numbers.

    Attributes:
        number: from 0.
        draft_ns, verify_ns: the services' time within the round, including queues.
        prepare_ns: the draft's time for proposals that extend this round, while it is verified.
    """

    span_id: str
    number: int
    mark: Mark
    num_drafted: int
    num_accepted: int
    start_ns: int
    end_ns: int
    draft_ns: int
    prepare_ns: int
    verify_ns: int
    network_ns: int

    @property
    def labels(self) -> list[str]:
        """From long to short: `7: hit ✓ 3/4` (accepted of drafted), `7 ✓ 3/4`, `✓ 3/4`, `3/4`."""
        counts = f"{self.num_accepted}/{self.num_drafted}"
        signed = f"{SIGNS[self.mark]} {counts}"
        return [f"{self.number}: {self.mark} {signed}", f"{self.number} {signed}", signed, counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Fractions of the time shown.

    Attributes:
        target: the target computes.
        draft: the draft computes, prepared work included.
        both: both at once.
        only_network: a message is in flight, and neither a service nor the rule works.
    """

    target: float
    draft: float
    both: float
    only_network: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything to draw.

    Attributes:
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
    start_ns: int
    end_ns: int
    rounds: Sequence[RoundFigures]
    num_rounds: int
    bars: Sequence[Bar]
    overlaps: Sequence[Interval]
    num_rows: Mapping[Lane, int]
    shares: Shares
    notes: Sequence[str]

    @property
    def is_part(self) -> bool:
        """Whether only some of the rounds are shown."""
        return len(self.rounds) < self.num_rounds

    def num_marked(self, mark: Mark) -> int:
        """Rounds shown with this mark."""
        return sum(shown.mark is mark for shown in self.rounds)

    @property
    def num_drafted_rounds(self) -> int:
        """Rounds shown that are hits or misses."""
        return len(self.rounds) - self.num_marked(Mark.PLAIN)


def make(generation: GenerationTrace, numbers: range | None = None) -> Timeline:
    """Lay a generation out.

    Args:
        numbers: rounds to show; None for all.

    Raises:
        ConfigError: it has none of these rounds.
    """
    return _Builder(generation).make(numbers)


@dataclass
class _Builder:
    """Builds the layout of one generation."""

    generation: GenerationTrace
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        spans = self.generation.spans
        self.root = self.generation.root
        self.by_id = {span.span_id: span for span in spans}
        self.children: dict[str, list[RecordedSpan]] = defaultdict(list)
        for span in spans:
            self.children[span.parent_id].append(span)
        calls = self.generation.named(*MODEL_CALLS)
        self.parts = {call.span_id: self._parts_of(call) for call in calls}
        self.shifts = _shifts([(call, self.parts[call.span_id]) for call in calls])

    def make(self, numbers: range | None) -> Timeline:
        bars = _in_rows([bar for span in self.generation.spans for bar in self._bars(span)])
        rounds = self._rounds(bars)
        shown = rounds if numbers is None else [one for one in rounds if one.number in numbers]
        if numbers is not None and not shown:
            raise ConfigError(f"--rounds {numbers.start}:{numbers.stop}: there are {_counted(rounds)}")
        start_ns, end_ns = 0, self.root.duration_ns
        if len(shown) < len(rounds):
            start_ns, end_ns = min(one.start_ns for one in shown), max(one.end_ns for one in shown)
        visible = [bar for bar in bars if bar.end_ns >= start_ns and bar.start_ns <= end_ns]
        window = (start_ns, end_ns)
        overlaps = intersection(
            _busy(visible, [BarKind.VERIFY_FORWARD], window), _busy(visible, _DRAFTING, window)
        )
        return Timeline(
            model=text(self.root, tracing.GEN_AI_REQUEST_MODEL),
            trace_id=self.root.trace_id,
            num_tokens=count(self.root, tracing.GEN_AI_USAGE_OUTPUT_TOKENS) or None,
            total_ns=self.root.duration_ns,
            start_ns=start_ns,
            end_ns=end_ns,
            rounds=shown,
            num_rounds=len(rounds),
            bars=visible,
            overlaps=overlaps,
            num_rows={lane: _num_rows(visible, lane) for lane in Lane},
            shares=_shares(visible, overlaps, window),
            notes=self._notes(bars),
        )

    def _parts_of(self, call: RecordedSpan) -> list[RecordedSpan]:
        """The service's spans of a call."""
        return [part for part in self.children[call.span_id] if part.name.startswith(f"{call.name}.")]

    def _bars(self, span: RecordedSpan) -> list[Bar]:
        if span.name in MODEL_CALLS:
            return self._network(span)
        if span.name not in _PLACES or span.name in (BarKind.NETWORK, BarKind.UNKNOWN):
            return []
        return [self._bar(BarKind(span.name), span.name, self._interval(span), span)]

    def _network(self, call: RecordedSpan) -> list[Bar]:
        """The parts of a call outside of the service's own spans."""
        start_ns, end_ns = self._interval(call)
        served = union(map(self._interval, self.parts[call.span_id]))
        if not served:
            title = (
                "draft, prepared before"
                if self._is_prepared(call)
                else f"{call.name}, no span of the service"
            )
            return [self._bar(BarKind.UNKNOWN, title, (start_ns, end_ns), call)]
        left = difference([(start_ns, end_ns)], served)
        return [self._bar(BarKind.NETWORK, _way(call, gap, served), gap, call) for gap in left]

    def _is_prepared(self, call: RecordedSpan) -> bool:
        return is_prepared(call, self.by_id[call.parent_id])

    def _bar(self, kind: BarKind, title: str, interval: Interval, span: RecordedSpan) -> Bar:
        round_id = self._round_id(span)
        return Bar(
            kind=kind, title=title, start_ns=interval[0], end_ns=interval[1], span=span, round_id=round_id
        )

    def _interval(self, span: RecordedSpan) -> Interval:
        shift_ns = self.shifts.get(_clock(span), 0) if self.shifts else 0
        offset = shift_ns - self.root.start_ns
        return span.start_ns + offset, span.end_ns + offset

    def _round_id(self, span: RecordedSpan) -> str:
        """Span id of its round; parents end at the root, as all spans here descend from it."""
        at = span
        while at is not self.root and at.name != "round":
            at = self.by_id[at.parent_id]
        return at.span_id if at is not self.root else ""

    def _rounds(self, bars: Iterable[Bar]) -> list[RoundFigures]:
        of_round: dict[str, list[Bar]] = defaultdict(list)
        for bar in bars:
            of_round[bar.round_id].append(bar)
        spans = self.generation.named("round")
        rounds = [self._round(i, span, of_round[span.span_id]) for i, span in enumerate(spans)]
        return sorted(rounds, key=lambda one: one.number)

    def _round(self, index: int, span: RecordedSpan, bars: Sequence[Bar]) -> RoundFigures:
        start_ns, end_ns = self._interval(span)

        def spent(*kinds: BarKind) -> int:
            """Time within the round; a draft may begin before it is requested."""
            whole = union(bar.interval for bar in bars if bar.kind in kinds)
            return length(intersection(whole, [(start_ns, end_ns)]))

        return RoundFigures(
            span_id=span.span_id,
            number=count(span, tracing.ROUND, index),
            mark=mark(span),
            num_drafted=count(span, tracing.NUM_DRAFT_TOKENS),
            num_accepted=count(span, tracing.NUM_ACCEPTED_TOKENS),
            start_ns=start_ns,
            end_ns=end_ns,
            draft_ns=spent(BarKind.DRAFT_QUEUE, BarKind.DRAFT_FORWARD),
            prepare_ns=spent(BarKind.DRAFT_PREPARE),
            verify_ns=spent(BarKind.VERIFY_QUEUE, BarKind.VERIFY_FORWARD),
            network_ns=spent(BarKind.NETWORK),
        )

    def _notes(self, bars: Sequence[Bar]) -> list[str]:
        notes = [
            f"The clock of the {role} service differs: its spans are moved by {shift_ns / 1e6:+.1f} ms"
            for (role, _), shift_ns in self.shifts.items()
            if abs(shift_ns) > SHOWN_SHIFT_NS
        ]
        num_unknown = sum(bar.kind is BarKind.UNKNOWN and not self._is_prepared(bar.span) for bar in bars)
        if num_unknown:
            notes.append(f"{num_unknown} calls have no span of the service they went to")
        if self.generation.num_lost:
            notes.append(f"{self.generation.num_lost} spans are left out: their parents are missing")
        missing = count(self.root, tracing.NUM_ROUNDS) - len(self.generation.named("round"))
        if missing > 0:
            notes.append(f"{missing} rounds are missing from the trace")
        return notes


def mark(span: RecordedSpan) -> Mark:
    """The mark of a `round` span."""
    if not count(span, tracing.NUM_DRAFT_TOKENS):
        return Mark.PLAIN
    return Mark.HIT if has_prepared(span) else Mark.MISS


def _way(call: RecordedSpan, gap: Interval, served: Sequence[Interval]) -> str:
    if gap[1] <= served[0][0]:
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
        served = union((part.start_ns, part.end_ns) for part in parts)
        if served and served[-1][1] - served[0][0] <= call.duration_ns:
            by_clock[_clock(parts[0])].append((call, (served[0][0], served[-1][1])))
    return {clock: shift for clock, found in by_clock.items() if (shift := _shift(found))}


def _shift(calls: Sequence[tuple[RecordedSpan, Interval]]) -> int:
    least = max(call.start_ns - start for call, (start, _) in calls)
    most = min(call.end_ns - end for call, (_, end) in calls)
    if least <= TOLERANCE_NS and most >= -TOLERANCE_NS:
        return 0
    middle = statistics.median_low(
        (call.start_ns + call.end_ns - start - end) // 2 for call, (start, end) in calls
    )
    return max(least, min(middle, most)) if least <= most else middle


def _in_rows(bars: Iterable[Bar]) -> list[Bar]:
    """Bars by start, placed on rows: one for each kind in use, more where bars of a kind overlap."""
    placed: list[Bar] = []
    by_lane: dict[Lane, list[Bar]] = defaultdict(list)
    for bar in bars:
        by_lane[bar.lane].append(bar)
    for in_lane in by_lane.values():
        below = 0
        for group in _groups(in_lane):
            packed = _packed(group)
            placed += [replace(bar, row=below + bar.row) for bar in packed]
            below += 1 + max(bar.row for bar in packed)
    return sorted(placed, key=lambda bar: (bar.start_ns, bar.end_ns))


def _groups(in_lane: Sequence[Bar]) -> list[list[Bar]]:
    """Bars of a lane by the row of their kind."""
    groups: dict[int, list[Bar]] = defaultdict(list)
    for bar in in_lane:
        groups[_PLACES[bar.kind][1]].append(bar)
    return [groups[row] for row in sorted(groups)]


def _packed(bars: Iterable[Bar]) -> list[Bar]:
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


def _num_rows(bars: Iterable[Bar], lane: Lane) -> int:
    return 1 + max((bar.row for bar in bars if bar.lane is lane), default=0)


def _busy(bars: Iterable[Bar], kinds: Sequence[BarKind], window: Interval) -> list[Interval]:
    return intersection(union(bar.interval for bar in bars if bar.kind in kinds), [window])


def _shares(bars: Sequence[Bar], overlaps: list[Interval], window: Interval) -> Shares:
    total_ns = max(1, window[1] - window[0])
    network = _busy(bars, [BarKind.NETWORK], window)
    working = _busy(bars, (*_SERVING, BarKind.ACCEPT), window)
    return Shares(
        target=length(_busy(bars, [BarKind.VERIFY_FORWARD], window)) / total_ns,
        draft=length(_busy(bars, _DRAFTING, window)) / total_ns,
        both=length(overlaps) / total_ns,
        only_network=length(difference(network, working)) / total_ns,
    )


def _counted(rounds: Sequence[RoundFigures]) -> str:
    return f"rounds {rounds[0].number} to {rounds[-1].number}" if rounds else "no rounds"
