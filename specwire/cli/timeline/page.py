"""The timeline as one self-contained HTML page.

All text from spans is escaped, and the Content-Security-Policy forbids loading anything. The script draws
from numbers; without scripts there is a static picture.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from specwire.cli.timeline.facts import LEGEND, MARKS, facts, printable, stage_facts
from specwire.cli.timeline.layout import (
    ROUND_STAGES,
    SIGNS,
    Bar,
    BarKind,
    Lane,
    Mark,
    RoundFigures,
    Timeline,
)
from specwire.cli.timeline.spans import RecordedSpan, Value

_ROW = 26
_GAP = 14
_TOP = 6
_LEFT = 100
_WIDTH = 1200
_AXIS = 24
"""Pixels; the width is that of the static picture."""
_COLUMNS = (
    "round",
    "drafted",
    "accepted",
    "proposal",
    *(stage.replace("_", " ") for stage in ROUND_STAGES),
    "failed",
    "prepared",
    "all",
)


def write(path: Path, timeline: Timeline) -> None:
    """Write the page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(render(timeline), encoding="utf-8", errors="replace")


def render(timeline: Timeline) -> str:
    """The page as text."""
    found = facts(timeline)
    title = html.escape(f"One generation of {found.pop('model')}")
    places = _Places(timeline)
    return _source("page.html").format(
        title=title,
        css=_source("page.css"),
        js=_source("page.js"),
        facts=_facts(found),
        stages=_facts(stage_facts(timeline)),
        notes="\n".join(f'<p class="note">{html.escape(note)}.</p>' for note in timeline.notes),
        strip=_strip(timeline),
        chart=_chart(timeline, places),
        legend=_legend(timeline),
        table=_table(timeline),
        data=_json(_data(timeline, places)),
    )


def _facts(found: Mapping[str, str]) -> str:
    return "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>" for name, value in found.items()
    )


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that can neither end the script element around it nor begin a comment there."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


class _Places:
    """Positions of rows and lanes, in pixels from the top.

    Attributes:
        rows: top of each row of all lanes together.
        lanes: top and bottom of each lane.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.rows: list[int] = []
        self.lanes: dict[Lane, tuple[int, int]] = {}
        self._first: dict[Lane, int] = {}
        top = _TOP
        for lane in Lane:
            self._first[lane] = len(self.rows)
            bottom = top + timeline.num_rows[lane] * _ROW
            self.rows += range(top, bottom, _ROW)
            self.lanes[lane] = (top, bottom)
            top = bottom + _GAP
        self.bottom = top - _GAP // 2
        self.height = self.bottom + _AXIS

    def row(self, bar: Bar) -> int:
        """The bar's row, counted over all lanes."""
        return self._first[bar.lane] + bar.row

    @property
    def both(self) -> tuple[int, int]:
        """Top and bottom of draft and verify together."""
        return self.lanes[Lane.DRAFT][0], self.lanes[Lane.VERIFY][1]


def _strip(timeline: Timeline) -> str:
    """All rounds in small, with the part in view."""
    scale = _scale(timeline)
    marks = "".join(
        f'<path id="strip-{mark}" class="{mark}" d="{_path(_intervals(timeline, mark), scale, 3, 16)}"/>'
        for mark in Mark
    )
    return (
        f'<svg id="strip" viewBox="0 0 {_WIDTH} 22" height="22" aria-hidden="true">'
        f'<text x="0" y="16">all rounds</text>{marks}'
        f'<rect id="view" class="view" x="{_LEFT}" y="1" width="{_WIDTH - _LEFT}" height="20"/></svg>'
    )


def _chart(timeline: Timeline, places: _Places) -> str:
    scale = _scale(timeline)
    top, bottom = places.both
    shapes = [
        f'<path id="overlaps" class="overlap" d="{_path(timeline.overlaps, scale, top, bottom - top)}"/>'
    ]
    shapes += ['<g id="ticks" class="tick"></g>']
    shapes += [
        f'<text x="0" y="{(top + bottom) / 2 + 5:g}">{lane}</text>'
        for lane, (top, bottom) in places.lanes.items()
    ]
    for mark in Mark:
        d = _path(_intervals(timeline, mark), scale, places.rows[0] + 1, _ROW - 2)
        shapes.append(f'<path id="rounds-{mark}" class="{mark}" d="{d}"/>')
    for kind in LEGEND:
        bars = [bar for bar in timeline.bars if bar.kind is kind]
        rows = sorted({places.row(bar) for bar in bars})
        d = "".join(
            _path([b.interval for b in bars if places.row(b) == row], scale, places.rows[row] + 2, _ROW - 4)
            for row in rows
        )
        shapes.append(f'<path id="bars-{_css(kind)}" class="{_css(kind)}" d="{d}"/>')
    shapes += ['<g id="labels" class="labels"></g>']
    size = f'viewBox="0 0 {_WIDTH} {places.height}" height="{places.height}"'
    about = html.escape(_described(timeline))
    return f'<svg id="chart" role="img" tabindex="0" {size} aria-label="{about}">{"".join(shapes)}</svg>'


def _described(timeline: Timeline) -> str:
    """A description of the picture, for screen readers."""
    numbers = "; ".join(f"{name}: {value}" for name, value in facts(timeline).items())
    return f"Lanes over time: {', '.join(Lane)}. {numbers}. The table below has every round."


def _css(kind: BarKind) -> str:
    return kind.replace(".", "-")


def _intervals(timeline: Timeline, mark: Mark) -> list[tuple[int, int]]:
    return [(one.start_ns, one.end_ns) for one in timeline.rounds if one.mark is mark]


def _scale(timeline: Timeline) -> tuple[int, float]:
    """Time at the left edge, pixels a nanosecond."""
    return timeline.start_ns, (_WIDTH - _LEFT) / max(1, timeline.end_ns - timeline.start_ns)


def _path(intervals: Iterable[tuple[int, int]], scale: tuple[int, float], top: float, height: float) -> str:
    """One SVG path of rectangles."""
    start_ns, per_ns = scale
    parts = []
    for start, end in intervals:
        left = max(_LEFT, _LEFT + (start - start_ns) * per_ns)
        right = min(_WIDTH, _LEFT + (end - start_ns) * per_ns)
        if left <= right:
            parts.append(f"M{left:.1f},{top}h{right - left:.1f}v{height}H{left:.1f}z")
    return "".join(parts)


def _legend(timeline: Timeline) -> str:
    kinds = {bar.kind for bar in timeline.bars}
    marks = {one.mark for one in timeline.rounds}
    entries = [(str(mark), f"{SIGNS[mark]} {text}") for mark, text in MARKS.items() if mark in marks]
    entries += [(_css(kind), text) for kind, text in LEGEND.items() if kind in kinds]
    if timeline.overlaps:
        entries.append(("overlap", "draft and target at once"))
    return "".join(f"<li>{_swatch(name)}{text}</li>" for name, text in entries)


def _swatch(name: str) -> str:
    rect = f'<rect class="{name}" x="1" y="1" width="16" height="10"/>'
    return f'<svg viewBox="0 0 18 12" aria-hidden="true">{rect}</svg>'


def _table(timeline: Timeline) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    rows = "\n".join(_table_row(i, one) for i, one in enumerate(timeline.rounds))
    caption = "Rounds, in ms as their calls say; prepared: the draft's work before it was requested"
    head = f"<caption>{caption}</caption><thead><tr>{head}</tr></thead>"
    return f'<table id="rounds">{head}\n<tbody>{rows}</tbody></table>'


def _table_row(index: int, one: RoundFigures) -> str:
    times_ms = [
        *one.stages_ms.values(),
        one.failed_ns / 1e6,
        (one.prepared_ns or 0) / 1e6,
        (one.end_ns - one.start_ns) / 1e6,
    ]
    cells = "".join(f"<td>{ms:.2f}</td>" for ms in times_ms)
    button = f'<button data-index="{index}" aria-label="show round {one.number}">{one.number}</button>'
    return (
        f"<tr><td>{button}</td><td>{one.num_drafted}</td><td>{one.num_accepted}</td>"
        f'<td class="mark {one.mark}">{one.mark}</td>{cells}</tr>'
    )


class _Texts:
    """Distinct texts, numbered: thousands of spans share a few attributes."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.all)
            self.all.append(text)
        return self._numbers[text]


def _data(timeline: Timeline, places: _Places) -> dict[str, Any]:
    """The input of page.js.

    Attributes of a span are numbers of texts, names and values in turn; a bar is [start, end, row, number of
    its title, number of its span].
    """
    texts = _Texts()
    spans: dict[str, int] = {}
    attributes: list[list[int]] = []

    def number(span: RecordedSpan) -> int:
        if span.span_id not in spans:
            spans[span.span_id] = len(attributes)
            attributes.append(_attributes(span, texts))
        return spans[span.span_id]

    by_id = {bar.span.span_id: bar.span for bar in timeline.bars if bar.kind is BarKind.ROUND}
    bars: dict[str, list[list[int]]] = {_css(kind): [] for kind in LEGEND}
    for bar in timeline.bars:
        if bar.kind is not BarKind.ROUND:
            title = texts.number(printable(bar.title))
            bars[_css(bar.kind)].append([*bar.interval, places.row(bar), title, number(bar.span)])
    return {
        "start": timeline.start_ns,
        "end": timeline.end_ns,
        "left": _LEFT,
        "row": _ROW,
        "rows": places.rows,
        "both": places.both,
        "bottom": places.bottom,
        "height": places.height,
        "marks": list(Mark),
        "rounds": [_round(one, number(by_id[one.span_id])) for one in timeline.rounds],
        "bars": bars,
        "labels": [
            [*bar.interval, places.row(bar), printable(bar.label), _css(bar.kind)]
            for bar in timeline.bars
            if bar.label
        ],
        "overlaps": [[*interval, 0] for interval in timeline.overlaps],
        "spans": attributes,
        "texts": texts.all,
    }


def _round(one: RoundFigures, span: int) -> dict[str, Any]:
    return {"start": one.start_ns, "end": one.end_ns, "mark": one.mark, "labels": one.labels, "span": span}


def _attributes(span: RecordedSpan, texts: _Texts) -> list[int]:
    shown: Mapping[str, Value] = {"service": span.service_name, "span": span.span_id, **span.attributes}
    return [
        texts.number(printable(text))
        for name, value in shown.items()
        for text in (name, value if isinstance(value, str) else json.dumps(value))
    ]
