"""Layout of the picture: bars in lanes, rounds with their marks. Pure.

Times are nanoseconds from the start of the `generate` span, by the coordinator's clock. What a stage took is
read from attributes, where the coordinator's ledger put it; only the places of bars come from times of spans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from specwire.completion import Stage
from specwire.errors import ConfigError
from specwire.telemetry import semantics as names
from tools.timeline.generation import (
    MODEL_CALLS,
    SERVES,
    TOLERANCE_NS,
    Clock,
    GenerationTrace,
    by_one_clock,
    is_answered,
    residence,
    served_ms,
)
from tools.timeline.intervals import Interval, gaps, intersection, union
from tools.timeline.spans import RecordedSpan

SHOWN_SHIFT_NS = 1_000_000


class Lane(StrEnum):
    """A lane of bars, from top to bottom."""

    COORDINATOR = "coordinator"
    DRAFT = "draft"
    VERIFY = "verify"
    NETWORK = "network"


class BarKind(StrEnum):
    """A kind of bar, with its lane, its colour and what the legend says of it."""

    ROUND = "round"
    """Drawn as its `Mark` says."""
    ADMISSION = "admission", Lane.COORDINATOR, "#b794f4", "waiting for a slot"
    OUTSIDE = "outside", Lane.COORDINATOR, "#cbd5a0", "outside of rounds: emit, client_credit, coordinator"
    ACCEPT = "accept", Lane.COORDINATOR, "#2d3748", "the rule"
    DRAFT_QUEUE = "draft.queue", Lane.DRAFT, "#f3cfa8", "waiting for the draft"
    DRAFT_FORWARD = "draft.forward", Lane.DRAFT, "#dd6b20", "draft, on request"
    DRAFT_HANDLING = "draft.handling", Lane.DRAFT, "#9c6b4a", "handling in the draft service"
    DRAFT_UNANSWERED = "draft.unanswered", Lane.DRAFT, "#f6c6c6", "in the draft service, not answered"
    DRAFT_PREPARE = "draft.prepare", Lane.DRAFT, "#97266d", "draft, prepared ahead (→ round that used it)"
    VERIFY_QUEUE = "verify.queue", Lane.VERIFY, "#bcd4ee", "waiting for the target"
    VERIFY_FORWARD = "verify.forward", Lane.VERIFY, "#2b6cb0", "target"
    VERIFY_HANDLING = "verify.handling", Lane.VERIFY, "#1a365d", "handling in the verify service"
    VERIFY_UNANSWERED = "verify.unanswered", Lane.VERIFY, "#f6c6c6", "in the verify service, not answered"
    NETWORK = "network", Lane.NETWORK, "#8a94a3", "on the way: network and gRPC"
    UNKNOWN = "unknown", Lane.NETWORK, "#d6dae0", "call without a span of the service"
    FAILED = "failed", Lane.NETWORK, "#e53e3e", "call that failed or was too late"
    EVENT = "event", Lane.COORDINATOR, "#c53030", "event"

    lane: Lane
    colour: str
    meaning: str

    def __new__(cls, name: str, lane: Lane = Lane.COORDINATOR, colour: str = "", meaning: str = "") -> Self:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.lane, kind.colour, kind.meaning = lane, colour, meaning
        return kind


class Mark(StrEnum):
    """Whether a round's proposal was prepared, with its sign, its colour and what the legend says of it."""

    HIT = "hit", "✓", "#c6efd6", "hit: prepared before it was requested"
    BEGUN = "begun", "◐", "#cdeef0", "begun before it was requested"
    MISS = "miss", "✗", "#fbd5d5", "miss: drafted on request"
    LOST = "lost", "!", "#f7dcb4", "lost: no draft there, or too late"
    PLAIN = "plain", "–", "#e5e8ec", "plain: nothing drafted"

    sign: str
    colour: str
    meaning: str

    def __new__(cls, name: str, sign: str, colour: str, meaning: str) -> Self:
        mark = str.__new__(cls, name)
        mark._value_ = name
        mark.sign, mark.colour, mark.meaning = sign, colour, meaning
        return mark


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


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval of work or waiting.

    Attributes:
        title: shown when the pointer is over it.
        span: source of its attributes; for the network the coordinator's call.
        label: drawn on it where it fits, and beside an event.
        row: within the lane, from 0; bars of one row do not overlap.
    """

    kind: BarKind
    title: str
    interval: Interval
    span: RecordedSpan
    label: str = ""
    row: int = 0

    @property
    def start_ns(self) -> int:
        return self.interval[0]

    @property
    def end_ns(self) -> int:
        return self.interval[1]


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """A round in numbers.

    Attributes:
        number: from 0.
        stages_ms: of `ROUND_STAGES`, as its calls say.
    """

    span: RecordedSpan
    number: int
    stages_ms: Mapping[Stage, float]

    @property
    def mark(self) -> Mark:
        outcome = self.span.text(names.CALL_OUTCOME)
        if not self.span.count(names.NUM_DRAFT_TOKENS):
            return Mark.LOST if outcome in ("timed_out", "unavailable", "lost") else Mark.PLAIN
        if self.span.attributes.get(names.DRAFT_PREPARED) is True:
            return Mark.HIT
        return Mark.BEGUN if outcome == "begun" else Mark.MISS

    @property
    def labels(self) -> list[str]:
        """From long to short: `7: hit ✓ 3/4` (accepted of drafted), `7 ✓ 3/4`, `✓ 3/4`, `3/4`."""
        num_accepted, num_drafted = map(self.span.count, (names.NUM_ACCEPTED_TOKENS, names.NUM_DRAFT_TOKENS))
        counts, mark = f"{num_accepted}/{num_drafted}", self.mark
        signed = f"{mark.sign} {counts}"
        return [f"{self.number}: {mark} {signed}", f"{self.number} {signed}", signed, counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything to draw.

    Attributes:
        root: the span `generate`.
        stages_ms: of the whole generation, as its span says; those that took time.
        start_ns, end_ns: of what is shown.
        rounds: that are shown, of `num_rounds` in the trace.
        bars: by start, including those of rounds.
        overlaps: times when target and draft compute at once.
        notes: caveats for the reader.
    """

    root: RecordedSpan
    stages_ms: Mapping[Stage, float]
    start_ns: int
    end_ns: int
    rounds: Sequence[RoundFigures]
    num_rounds: int
    bars: Sequence[Bar]
    overlaps: Sequence[Interval]
    notes: Sequence[str]

    @property
    def num_rows(self) -> dict[Lane, int]:
        """Of each lane."""
        return {
            lane: 1 + max((bar.row for bar in self.bars if bar.kind.lane is lane), default=0) for lane in Lane
        }

    @property
    def overlap_share(self) -> float:
        """Fraction of the time shown in which target and draft compute at once."""
        overlap_ns = sum(end_ns - start_ns for start_ns, end_ns in self.overlaps)
        return overlap_ns / max(1, self.end_ns - self.start_ns)


def make(generation: GenerationTrace, numbers: range | None = None) -> Timeline:
    """Lay a generation out.

    Args:
        numbers: rounds to show; None for all.

    Raises:
        ConfigError: it has none of these rounds.
    """
    generation, shifts = by_one_clock(generation)
    rounds = _rounds(generation)
    shown = rounds if numbers is None else [one for one in rounds if one.number in numbers]
    if numbers is not None and not shown:
        there = f"rounds {rounds[0].number} to {rounds[-1].number}" if rounds else "no rounds"
        raise ConfigError(f"--rounds {numbers.start}:{numbers.stop}: there are {there}")
    root, stages = generation.root, {stage: names.stage_attribute(stage) for stage in Stage}
    stages_ms = {stage: spent_ms for stage, name in stages.items() if (spent_ms := root.number(name))}
    start_ns, end_ns = root.interval
    if len(shown) < len(rounds):
        start_ns, end_ns = min(one.span.start_ns for one in shown), max(one.span.end_ns for one in shown)
    bars = _in_rows(_bars(generation, rounds))
    visible = [bar for bar in bars if bar.end_ns >= start_ns and bar.start_ns <= end_ns]
    drafting, verifying = (
        union(bar.interval for bar in visible if bar.kind in kinds) for kinds in (_DRAFTING, _VERIFYING)
    )
    notes = _notes(generation, shifts, bars)
    if not stages_ms:
        notes.insert(0, "The span generate says no stages: it is not of this version, or not of its end")
    return Timeline(
        root=root,
        stages_ms=stages_ms,
        start_ns=start_ns,
        end_ns=end_ns,
        rounds=shown,
        num_rounds=len(rounds),
        bars=visible,
        overlaps=intersection([(start_ns, end_ns)], intersection(drafting, verifying)),
        notes=notes,
    )


def _rounds(generation: GenerationTrace) -> list[RoundFigures]:
    """By number."""
    found = []
    for place, span in enumerate(generation.named("round")):
        stages_ms = dict.fromkeys(ROUND_STAGES, 0.0)
        for call in generation.children[span.span_id]:
            if call.name in MODEL_CALLS:
                for name, part in _PARTS.items():
                    stages_ms[Stage(call.name + part)] += call.number(name) or 0.0
        found.append(RoundFigures(span, span.count(names.ROUND, place), stages_ms))
    return sorted(found, key=lambda one: one.number)


def _bars(generation: GenerationTrace, rounds: Sequence[RoundFigures]) -> Iterator[Bar]:
    """All bars, in no order."""
    for call in generation.named(*MODEL_CALLS):
        yield from _of_call(call, generation.served(call))
    for serve in generation.named(*SERVES):
        yield from _of_serve(serve, generation.children[serve.span_id])
    for span in generation.named("round", "admission", "accept", *_FINER):
        yield Bar(BarKind(span.name), span.name, span.interval, span)
    users = {link.span_id: one.number for one in rounds for link in one.span.links}
    for span in generation.named("draft.prepare"):
        user = users.get(span.span_id)
        use, label = ("not used", "") if user is None else (f"used by round {user}", f"→ {user}")
        yield Bar(BarKind.DRAFT_PREPARE, f"{span.name}, {use}", span.interval, span, label)
    for span in generation.spans:
        for event in span.events:
            reason = event.attributes.get(names.ERROR_TYPE)
            title = f"{event.name}: {reason}" if isinstance(reason, str) else event.name
            yield Bar(BarKind.EVENT, title, (event.time_ns, event.time_ns), span, event.name)
    inside = [span.interval for span in generation.named("admission", "round")]
    for gap in gaps(generation.root.interval, inside):
        if gap[1] - gap[0] > TOLERANCE_NS:
            yield Bar(BarKind.OUTSIDE, BarKind.OUTSIDE.meaning, gap, generation.root)


def _of_call(call: RecordedSpan, serves: Sequence[RecordedSpan]) -> Iterator[Bar]:
    """All of it if it failed; else its parts outside of the service's own spans."""
    if call.is_failed:
        address = call.text(names.SERVER_ADDRESS)
        why = f"{call.name} failed: {call.text(names.ERROR_TYPE) or 'error'}"
        why += f", at {address}" if address else ""
        yield Bar(BarKind.FAILED, why, call.interval, call, "✗")
    elif not is_answered(call):
        yield Bar(BarKind.FAILED, f"{call.name}: no answer in time", call.interval, call, "✗")
    elif not serves:
        yield Bar(BarKind.UNKNOWN, f"{call.name}, no span of the service", call.interval, call)
    else:
        served = union(map(residence, serves))  # none if the answer was on its way before
        for gap in gaps(call.interval, served):
            yield Bar(BarKind.NETWORK, _way(call, gap, served), gap, call)


def _way(call: RecordedSpan, gap: Interval, served: Sequence[Interval]) -> str:
    if call.text(names.CALL_OUTCOME) == "begun":
        return f"network, answer of {call.name}, begun ahead"
    if not served or gap[1] <= served[0][0]:
        return f"network, request to {call.name}"
    return f"network, answer of {call.name}" if gap[0] >= served[-1][1] else f"network, {call.name}"


def _of_serve(serve: RecordedSpan, below: Sequence[RecordedSpan]) -> Iterator[Bar]:
    """A request at its service: queue, passes and handling in this order, or as finer spans say."""
    role = serve.name.partition(".")[0]
    whole = start_ns, end_ns = residence(serve)
    spent_ms = served_ms(serve)
    finer = [span.interval for span in below if span.name in _FINER]
    if spent_ms is None:
        yield Bar(BarKind(f"{role}.unanswered"), f"{serve.name}, not answered", whole, serve)
    elif finer:
        for gap in gaps(whole, finer):
            yield Bar(BarKind(f"{role}.handling"), f"{role}.handling", gap, serve)
    else:
        for part, part_ms in zip(("queue", "forward", "handling"), spent_ms, strict=True):
            until_ns = min(start_ns + round(part_ms * 1e6), end_ns)
            if start_ns < until_ns:
                yield Bar(BarKind(f"{role}.{part}"), f"{role}.{part}", (start_ns, until_ns), serve)
            start_ns = until_ns


def _notes(generation: GenerationTrace, shifts: Mapping[Clock, int], bars: Sequence[Bar]) -> list[str]:
    notes = [
        f"The clock of the {role} service differs: its spans are moved by {shift_ns / 1e6:+.1f} ms"
        for (role, _), shift_ns in shifts.items()
        if abs(shift_ns) > SHOWN_SHIFT_NS
    ]
    num_missing = generation.root.count(names.NUM_ROUNDS) - len(generation.named("round"))
    found = {
        "calls have no span of the service they went to": sum(bar.kind is BarKind.UNKNOWN for bar in bars),
        "spans are left out: their parents are missing": generation.num_lost,
        "rounds are missing from the trace": num_missing,
    }
    return notes + [f"{num} {what}" for what, num in found.items() if num > 0]


def _in_rows(bars: Iterable[Bar]) -> list[Bar]:
    """Bars by start, each on the first row of its lane that is free, up to the tolerance of clocks; those of
    the second row on the first one beneath all others."""
    ends_ns: dict[tuple[Lane, bool], list[int]] = defaultdict(list)
    placed = []
    for bar in sorted(bars, key=lambda bar: bar.interval):
        rows = ends_ns[bar.kind.lane, bar.kind in _SECOND_ROW]
        row = next((row for row, end in enumerate(rows) if end <= bar.start_ns + TOLERANCE_NS), len(rows))
        rows[row : row + 1] = [bar.end_ns]
        placed.append(replace(bar, row=row))
    return [
        replace(bar, row=bar.row + len(ends_ns[bar.kind.lane, False])) if bar.kind in _SECOND_ROW else bar
        for bar in placed
    ]
