"""A timeline in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

A process for each lane, a thread for each of its rows, on which slices do not overlap. The generation is a
slice above the coordinator's rows.
"""

from __future__ import annotations

from typing import Any

from specwire.telemetry import semantics as names
from tools.timeline.layout import Bar, BarKind, Lane, Timeline

Event = dict[str, Any]
_PIDS = {lane: number for number, lane in enumerate(Lane, 1)}


def document(timeline: Timeline) -> dict[str, Any]:
    """The file's content; times are microseconds from the start of the generation."""
    about = {"model": timeline.model, "trace_id": timeline.trace_id, "notes": "\n".join(timeline.notes)}
    whole = {
        **_place(Lane.COORDINATOR, -1, timeline.start_ns),
        "ph": "X",
        "name": names.GENERATE,
        "cat": names.GENERATE,
        "args": {f"{stage}_ms": spent_ms for stage, spent_ms in timeline.stages_ms.items()},
        "dur": (timeline.end_ns - timeline.start_ns) / 1e3,
    }
    events = [*_names(timeline), whole, *_slices(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(timeline: Timeline) -> list[Event]:
    found: list[Event] = []
    for lane, pid in _PIDS.items():
        found += [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": str(lane)}},
            {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
        ]
        threads = range(1, 1 + timeline.num_rows[lane])
        found += [
            {"ph": "M", "pid": pid, "tid": n, "name": "thread_name", "args": {"name": lane}} for n in threads
        ]
    return found


def _slices(timeline: Timeline) -> list[Event]:
    """Bars, cut where they begin before the one before them ends: clocks of services differ by a little."""
    found = []
    ends_ns: dict[tuple[Lane, int], int] = {}
    for bar in timeline.bars:
        if bar.kind is BarKind.EVENT:
            found.append({**_place(bar.lane, bar.row, bar.start_ns), **_about(bar), "ph": "i", "s": "p"})
            continue
        start_ns = max(bar.start_ns, ends_ns.get((bar.lane, bar.row), bar.start_ns))
        end_ns = ends_ns[bar.lane, bar.row] = max(bar.end_ns, start_ns)
        place = _place(bar.lane, bar.row, start_ns)
        found.append({**place, **_about(bar), "ph": "X", "dur": (end_ns - start_ns) / 1e3})
    return found


def _place(lane: Lane, row: int, at_ns: int) -> Event:
    return {"pid": _PIDS[lane], "tid": row + 1, "ts": at_ns / 1e3}


def _about(bar: Bar) -> Event:
    return {"name": bar.title, "cat": str(bar.kind), "args": dict(bar.span.attributes)}
