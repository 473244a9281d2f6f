"""The timeline as one SVG file: browsers open it, documents show it, and it loads nothing.

Pointing at a bar shows its span. All text from spans is escaped.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from specwire.telemetry import semantics as names
from tools.timeline.layout import Bar, BarKind, Lane, Mark, RoundFigures, Timeline

MAX_ROUNDS = 12
"""With more, rounds are too narrow for their labels, unless the picture grows."""
_OVERLAP = ("#fbf0c4", "draft and target at once")
_MAX_TEXT = 200
_WIDTH, _LEFT, _ROW, _GAP, _LINE, _CHARACTER = 1400, 100, 28, 10, 20, 7.5
"""Pixels; the width is that of a few rounds."""
_FACTS_A_LINE, _LEGEND_A_LINE = 6, 4


def middle(timeline: Timeline) -> range | None:
    """Rounds in the middle, if all of them would be too narrow; the first ones are not typical."""
    if len(timeline.rounds) <= MAX_ROUNDS:
        return None
    first = timeline.rounds[(len(timeline.rounds) - MAX_ROUNDS) // 2].number
    return range(first, first + MAX_ROUNDS)


def render(timeline: Timeline) -> str:
    return _Picture(timeline).render()


def facts(timeline: Timeline) -> dict[str, str]:
    """The figures at the top, by name, without the stages."""
    num_tokens = timeline.root.count(names.GEN_AI_USAGE_OUTPUT_TOKENS)
    found = {
        "tokens": str(num_tokens or "not known"),
        "total time": f"{timeline.root.duration_ns / 1e6:.1f} ms",
        "rounds": str(timeline.num_rounds),
    }
    shown, shown_ns = timeline.rounds, timeline.end_ns - timeline.start_ns
    if len(shown) < timeline.num_rounds:
        found["shown"] = f"rounds {shown[0].number} to {shown[-1].number}, {shown_ns / 1e6:.1f} ms"
    return found | {"hits": _hits(timeline), "both at once": f"{timeline.overlap_share:.0%}"}


def stage_facts(timeline: Timeline) -> dict[str, str]:
    """What the ledger says of the whole generation: stages in its order, and what is beside them."""
    total_ms = sum(timeline.stages_ms.values())
    found = {
        stage.replace("_", " "): f"{spent_ms:.1f} ms ({spent_ms / total_ms:.0%})"
        for stage, spent_ms in timeline.stages_ms.items()
    }
    ahead_ms = timeline.root.number(names.AHEAD_MS)
    if ahead_ms is not None:
        found["ahead"] = f"{ahead_ms:.1f} ms, beside the others"
    return found


def _hits(timeline: Timeline) -> str:
    num = Counter(one.mark for one in timeline.rounds)
    num_drafted = num[Mark.HIT] + num[Mark.BEGUN] + num[Mark.MISS]
    if not num_drafted:
        return "no drafts"
    begun = f", {num[Mark.BEGUN]} begun" if num[Mark.BEGUN] else ""
    return f"{num[Mark.HIT] / num_drafted:.0%} ({num[Mark.HIT]} of {num_drafted}{begun})"


def _printable(text: str) -> str:
    """Text from spans, shortened, escaped, with unprintable characters replaced."""
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text[:_MAX_TEXT])
    return html.escape(shown if len(text) <= _MAX_TEXT else f"{shown}… ({len(text)} characters)")


class _Picture:
    """Lines of facts above, lanes over time with their axis, the legend beneath."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.rounds = {one.span.span_id: one for one in timeline.rounds}
        self.width = _LEFT + max(1, len(timeline.rounds) / MAX_ROUNDS) * (_WIDTH - _LEFT)
        self.per_ns = (self.width - _LEFT) / max(1, timeline.end_ns - timeline.start_ns)
        self.head = [*_lines(facts(timeline)), *_lines(stage_facts(timeline))]
        self.head += [f"{note}." for note in timeline.notes]
        top = 2 * _LINE + len(self.head) * _LINE
        self.lanes: dict[Lane, tuple[int, int]] = {}
        for lane in Lane:
            bottom = top + timeline.num_rows[lane] * _ROW
            self.lanes[lane] = (top, bottom)
            top = bottom + _GAP
        self.bottom = top

    def render(self) -> str:
        top, bottom = self.lanes[Lane.DRAFT][0], self.lanes[Lane.VERIFY][1]
        overlaps = [
            _rect(self._x(start_ns), top, self._x(end_ns), bottom, _OVERLAP[0])
            for start_ns, end_ns in self.timeline.overlaps
        ]
        parts = [*self._head(), *overlaps, *self._axis()]
        parts += [part for bar in self.timeline.bars for part in self._bar(bar)]
        legend = list(self._legend())
        height = self.bottom + 3 * _LINE + (len(legend) // _LEGEND_A_LINE + 1) * _LINE
        size = f'width="{self.width:.0f}" height="{height}" viewBox="0 0 {self.width:.0f} {height}"'
        about = f'role="img" aria-label="One generation: lanes over time, {", ".join(Lane)}"'
        style = 'font-family="system-ui, sans-serif" font-size="12" fill="#1a202c"'
        back = '<rect width="100%" height="100%" fill="#ffffff"/>'
        body = "\n".join([back, *parts, *legend])
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {about} {style}>\n{body}\n</svg>\n'

    def _head(self) -> Iterator[str]:
        model = _printable(self.timeline.root.text(names.GEN_AI_REQUEST_MODEL)) or "a model that is not named"
        yield f'<text x="8" y="{_LINE}" font-size="15" font-weight="bold">One generation of {model}</text>'
        for number, line in enumerate(self.head, 2):
            yield f'<text x="8" y="{number * _LINE}">{html.escape(line)}</text>'

    def _axis(self) -> Iterator[str]:
        for lane, (top, bottom) in self.lanes.items():
            yield f'<text x="8" y="{(top + bottom) / 2 + 4:g}" font-size="13">{lane}</text>'
        for at_ns, label in _ticks(self.timeline, (self.width - _LEFT) / 110):
            x, (top, _) = self._x(at_ns), self.lanes[Lane.COORDINATOR]
            anchor = "end" if x > self.width - 40 else "middle"
            yield f'<path d="M{x:.1f} {top}V{self.bottom}" stroke="#0002"/>'
            yield f'<text x="{x:.1f}" y="{self.bottom + 14}" text-anchor="{anchor}">{label}</text>'
        text = "milliseconds from the start of the generation"
        yield f'<text x="{self.width:.0f}" y="{self.bottom + 30}" text-anchor="end">{text}</text>'

    def _bar(self, bar: Bar) -> Iterator[str]:
        """Its rectangle, and its label where it fits; an event is a cross with its label beside it."""
        left, right = self._x(bar.start_ns), self._x(bar.end_ns)
        top = self.lanes[bar.kind.lane][0] + bar.row * _ROW
        base, one = top + _ROW / 2 + 4, self.rounds.get(bar.span.span_id)
        title = f"<title>{_about(bar, one)}</title>"
        if bar.kind is BarKind.EVENT:
            text = f"✖ {_printable(bar.label)}{title}"
            where = (
                f'x="{left:.1f}" y="{base}" text-anchor="{"end" if left > 0.85 * self.width else "start"}"'
            )
            yield f'<text {where} fill="{bar.kind.colour}">{text}</text>'
        elif bar.kind is not BarKind.ROUND:
            yield _rect(left, top + 2, right, top + _ROW - 2, bar.kind.colour, title)
            yield from self._label([bar.label], (left, right), base, "#ffffff")
        elif one is not None:
            yield _rect(left, top + 1, right - 1, top + _ROW - 1, one.mark.colour, title)
            yield from self._label(one.labels, (left, right), base, "#1a202c")

    def _label(self, texts: list[str], ends: tuple[float, float], y: float, colour: str) -> Iterator[str]:
        """The first that fits."""
        text = next((text for text in texts if len(text) * _CHARACTER < ends[1] - ends[0]), "")
        if text:
            where = f'x="{sum(ends) / 2:.1f}" y="{y}" text-anchor="middle" pointer-events="none"'
            yield f'<text {where} fill="{colour}">{_printable(text)}</text>'

    def _legend(self) -> Iterator[str]:
        kinds = {bar.kind for bar in self.timeline.bars} - {BarKind.ROUND}
        marks = {one.mark for one in self.timeline.rounds}
        entries = [(mark.colour, f"{mark.sign} {mark.meaning}") for mark in Mark if mark in marks]
        entries += [(kind.colour, kind.meaning) for kind in BarKind if kind in kinds]
        entries += [_OVERLAP] if self.timeline.overlaps else []
        for number, (colour, text) in enumerate(entries):
            row, column = divmod(number, _LEGEND_A_LINE)
            x, y = 8 + column * _WIDTH / _LEGEND_A_LINE, self.bottom + 2.5 * _LINE + row * _LINE
            yield _rect(x, y, x + 16, y + 11, colour)
            yield f'<text x="{x + 22}" y="{y + 10}">{text}</text>'

    def _x(self, at_ns: int) -> float:
        """Pixels from the left, no further than the lanes go."""
        return min(max(_LEFT, _LEFT + (at_ns - self.timeline.start_ns) * self.per_ns), self.width)


def _lines(found: Mapping[str, str]) -> list[str]:
    pairs = [f"{name}: {value}" for name, value in found.items()]
    return [" · ".join(pairs[i : i + _FACTS_A_LINE]) for i in range(0, len(pairs), _FACTS_A_LINE)]


def _rect(left: float, top: float, right: float, bottom: float, colour: str, inner: str = "") -> str:
    size = f'x="{left:.1f}" y="{top:g}" width="{max(0.8, right - left):.1f}" height="{bottom - top:g}"'
    return f'<rect {size} fill="{colour}">{inner}</rect>'


def _ticks(timeline: Timeline, num: float) -> Iterator[tuple[int, str]]:
    """At most about so many moments at round numbers of milliseconds."""
    rough = max(1, timeline.end_ns - timeline.start_ns) / 1e6 / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(times for times in (1, 2, 5, 10) if times * power >= rough)
    digits = max(0, -math.floor(math.log10(step)))
    for i in range(math.ceil(timeline.start_ns / 1e6 / step), math.floor(timeline.end_ns / 1e6 / step) + 1):
        yield round(i * step * 1e6), f"{i * step:.{digits}f}"


def _about(bar: Bar, one: RoundFigures | None) -> str:
    """What is shown when the pointer is over a bar: its times, its round's stages, its span's attributes."""
    span, is_round = bar.span, one is not None and bar.kind is BarKind.ROUND
    start_ms, spent_ms = bar.start_ns / 1e6, (bar.end_ns - bar.start_ns) / 1e6
    shown = {"start": f"{start_ms:.3f} ms", "duration": f"{spent_ms:.3f} ms"}
    if one is not None and is_round:
        shown |= {stage: f"{stage_ms:.2f} ms" for stage, stage_ms in one.stages_ms.items() if stage_ms}
    shown |= {"service": span.service_name, "span": span.span_id}
    shown |= {
        key: each if isinstance(each, str) else json.dumps(each) for key, each in span.attributes.items()
    }
    title = one.labels[0] if one is not None and is_round else bar.title
    return "\n".join([_printable(title), *(_printable(f"{name}: {value}") for name, value in shown.items())])
