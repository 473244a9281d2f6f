"""A timeline in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

A process for each lane, a thread for each of its rows, on which slices do not overlap. The generation is a
slice above the coordinator's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specwire.telemetry import semantics as names
from tools.timeline.layout import BarKind, Lane, Timeline

Event = dict[str, Any]
_PIDS = {lane: number for number, lane in enumerate(Lane, 1)}


def document(timeline: Timeline) -> dict[str, Any]:
    """The file's content; times are microseconds from the start of the generation."""
    about = {
        "model": timeline.root.text(names.GEN_AI_REQUEST_MODEL),
        "trace_id": timeline.root.trace_id,
        "notes": "\n".join(timeline.notes),
    }
    whole = {
        **_slice(Lane.COORDINATOR, -1, timeline.start_ns, timeline.end_ns),
        "name": names.GENERATE,
        "cat": names.GENERATE,
        "args": {f"{stage}_ms": spent_ms for stage, spent_ms in timeline.stages_ms.items()},
    }
    events = [*_names(timeline), whole, *_bars(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(timeline: Timeline) -> Iterator[Event]:
    for lane, num_rows in timeline.num_rows.items():
        about = {"ph": "M", "pid": _PIDS[lane]}
        yield {**about, "name": "process_name", "args": {"name": str(lane)}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": _PIDS[lane]}}
        for row in range(num_rows):
            yield {**about, "tid": row + 1, "name": "thread_name", "args": {"name": lane}}


def _bars(timeline: Timeline) -> Iterator[Event]:
    """Cut where they begin before the one before them ends: clocks of services differ by a little."""
    ends_ns: dict[tuple[Lane, int], int] = {}
    for bar in timeline.bars:
        about = {"name": bar.title, "cat": str(bar.kind), "args": dict(bar.span.attributes)}
        place = lane, row = bar.kind.lane, bar.row
        if bar.kind is BarKind.EVENT:
            yield {**_place(lane, row, bar.start_ns), **about, "ph": "i", "s": "p"}
            continue
        start_ns = max(bar.start_ns, ends_ns.get(place, bar.start_ns))
        ends_ns[place] = max(bar.end_ns, start_ns)
        yield {**_slice(lane, row, start_ns, ends_ns[place]), **about}


def _slice(lane: Lane, row: int, start_ns: int, end_ns: int) -> Event:
    return {**_place(lane, row, start_ns), "ph": "X", "dur": (end_ns - start_ns) / 1e3}


def _place(lane: Lane, row: int, at_ns: int) -> Event:
    return {"pid": _PIDS[lane], "tid": row + 1, "ts": at_ns / 1e3}
