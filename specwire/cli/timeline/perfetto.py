"""A timeline in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

A process for each lane. Its slices nest: a round in its generation, what the rule took in its round, queue
and passes in their request. Requests of a service that overlap are on several of its threads.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.cli.timeline.layout import Bar, BarKind, Lane, Timeline
from specwire.telemetry import semantics as names

Event = dict[str, Any]
_PIDS = {lane: number for number, lane in enumerate(Lane, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """An interval, in nanoseconds, and those within it, which do not overlap."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    inner: Sequence[_Slice] = ()


def write(path: Path, timeline: Timeline) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(document(timeline)), encoding="utf-8")


def document(timeline: Timeline) -> dict[str, Any]:
    """The file's content; times are microseconds from the start of the generation."""
    events: list[Event] = []
    for lane in Lane:
        bars = [bar for bar in timeline.bars if bar.lane is lane and bar.kind is not BarKind.EVENT]
        slices = [_generation(timeline, bars)] if lane is Lane.COORDINATOR else _requests(bars)
        for thread, on_thread in enumerate(_threads(slices)):
            events += _named(lane, thread)
            events += (event for one in on_thread for event in _events(one, _PIDS[lane], thread))
    events += map(_instant, (bar for bar in timeline.bars if bar.kind is BarKind.EVENT))
    about = {"model": timeline.model, "trace_id": timeline.trace_id, "notes": "\n".join(timeline.notes)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _generation(timeline: Timeline, bars: Sequence[Bar]) -> _Slice:
    """The coordinator's whole time; its stages are the attributes."""
    within = defaultdict(list)
    for bar in bars:
        if bar.kind is BarKind.ACCEPT:
            within[bar.span.parent_id].append(_slice(bar))
    tops = [bar for bar in bars if bar.kind is not BarKind.ACCEPT]
    return _Slice(
        name=names.GENERATE,
        category=names.GENERATE,
        start_ns=timeline.start_ns,
        end_ns=timeline.end_ns,
        attributes={f"{stage}_ms": spent_ms for stage, spent_ms in timeline.stages_ms.items()},
        inner=_in_turn(
            _slice(bar, within[bar.span.span_id] if bar.kind is BarKind.ROUND else ()) for bar in tops
        ),
    )


def _requests(bars: Iterable[Bar]) -> list[_Slice]:
    """Bars of a service or the network, those of a request within a slice of their own."""
    grouped: dict[str, list[Bar]] = defaultdict(list)
    alone = []
    for bar in bars:
        if bar.lane is Lane.NETWORK:
            alone.append(_slice(bar))
        else:
            is_whole = bar.span.name.endswith((".serve", ".prepare"))
            grouped[bar.span.span_id if is_whole else bar.span.parent_id].append(bar)
    return alone + [_request(group) for group in grouped.values()]


def _request(bars: Sequence[Bar]) -> _Slice:
    whole = next((bar for bar in bars if bar.kind is BarKind.DRAFT_PREPARE), None)
    if whole is not None:
        return _slice(whole, [_slice(bar) for bar in bars if bar is not whole])
    first = bars[0]
    return _Slice(
        name=f"{first.lane}.serve",
        category="request",
        start_ns=min(bar.start_ns for bar in bars),
        end_ns=max(bar.end_ns for bar in bars),
        attributes={},
        inner=_in_turn(map(_slice, bars)),
    )


def _slice(bar: Bar, inner: Iterable[_Slice] = ()) -> _Slice:
    return _Slice(
        name=bar.title,
        category=str(bar.kind),
        start_ns=bar.start_ns,
        end_ns=bar.end_ns,
        attributes=dict(bar.span.attributes),
        inner=_in_turn(inner),
    )


def _in_turn(slices: Iterable[_Slice]) -> list[_Slice]:
    return sorted(slices, key=lambda one: (one.start_ns, one.end_ns))


def _threads(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Each slice on the first thread where nothing overlaps it."""
    threads: list[list[_Slice]] = []
    for one in _in_turn(slices):
        free = next((thread for thread in threads if thread[-1].end_ns <= one.start_ns), None)
        if free is None:
            threads.append(free := [])
        free.append(one)
    return threads


def _events(one: _Slice, pid: int, thread: int, bounds: tuple[int, int] | None = None) -> Iterator[Event]:
    """A slice and those within it, cut to it: clocks of services differ by a little."""
    least, most = bounds or (one.start_ns, one.end_ns)
    start_ns = min(max(one.start_ns, least), most)
    end_ns = min(max(one.end_ns, start_ns), most)
    yield {
        "ph": "X",
        "name": one.name,
        "cat": one.category,
        "pid": pid,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": one.attributes,
    }
    at_ns = start_ns
    for inner in one.inner:
        yield from _events(inner, pid, thread, (at_ns, end_ns))
        at_ns = min(max(inner.end_ns, at_ns), end_ns)


def _named(lane: Lane, thread: int) -> list[Event]:
    place = {"ph": "M", "pid": _PIDS[lane], "tid": thread}
    return [
        {**place, "name": "process_name", "args": {"name": str(lane)}},
        {**place, "name": "process_sort_index", "args": {"sort_index": _PIDS[lane]}},
        {
            **place,
            "name": "thread_name",
            "args": {"name": str(lane) if thread == 0 else f"{lane} {thread + 1}"},
        },
    ]


def _instant(bar: Bar) -> Event:
    """Something that happened at one moment."""
    place = {"pid": _PIDS[bar.lane], "tid": 0, "ts": bar.start_ns / 1e3, "s": "p"}
    return {"ph": "i", "name": bar.title, "cat": str(bar.kind), **place}
