"""The timeline as a PNG, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwire.cli.timeline.facts import LEGEND, MARKS, facts, stage_facts
from specwire.cli.timeline.layout import Bar, BarKind, Lane, Mark, RoundFigures, Timeline
from specwire.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_READABLE_ROUNDS = 12
"""With more, rounds are too narrow for their labels."""
COLOURS = {
    BarKind.ADMISSION: "#b794f4",
    BarKind.OUTSIDE: "#cbd5a0",
    BarKind.ACCEPT: "#2d3748",
    BarKind.DRAFT_QUEUE: "#f3cfa8",
    BarKind.DRAFT_FORWARD: "#dd6b20",
    BarKind.DRAFT_HANDLING: "#9c6b4a",
    BarKind.DRAFT_UNANSWERED: "#f6c6c6",
    BarKind.DRAFT_PREPARE: "#97266d",
    BarKind.VERIFY_QUEUE: "#bcd4ee",
    BarKind.VERIFY_FORWARD: "#2b6cb0",
    BarKind.VERIFY_HANDLING: "#1a365d",
    BarKind.VERIFY_UNANSWERED: "#f6c6c6",
    BarKind.NETWORK: "#8a94a3",
    BarKind.UNKNOWN: "#d6dae0",
    BarKind.FAILED: "#e53e3e",
    BarKind.EVENT: "#c53030",
}
MARK_COLOURS = {
    Mark.HIT: ("#c6efd6", "#276749"),
    Mark.BEGUN: ("#cdeef0", "#285e61"),
    Mark.MISS: ("#fbd5d5", "#9b2c2c"),
    Mark.LOST: ("#f7dcb4", "#7b341e"),
    Mark.PLAIN: ("#e5e8ec", "#4a5568"),
}
"""Fill and edge."""
_OVERLAP = "#fbf0c4"
_WIDTH_IN, _ROW_IN, _AXES_IN = 15.0, 0.42, 13.6
_GAP = 0.35
_STAGES_A_LINE = 7
_CHARACTER_IN = 0.078


def check() -> None:
    """Raises:
    ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a PNG needs matplotlib (pip install 'specwire[bench]'); a page does not") from None


def draw(path: Path, shown: Timeline, whole: Timeline) -> None:
    """Write a PNG.

    Args:
        shown: what is drawn in detail.
        whole: source of the figures at the top; if it has more rounds, they are drawn small above.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    check()
    from matplotlib.figure import Figure  # not pyplot: no window system, no state

    with_strip = len(whole.rounds) > len(shown.rounds)
    tops = _tops(shown)
    height = _bottom(shown, tops) * _ROW_IN
    figure = Figure(figsize=(_WIDTH_IN, height + 2.2 + 0.5 * with_strip), layout="constrained")
    ratios = (0.32, height) if with_strip else (height,)
    *strips, axes = figure.subplots(len(ratios), 1, height_ratios=ratios, squeeze=False)[:, 0]
    if strips:
        _draw_strip(strips[0], whole, shown)
    _draw_lanes(axes, shown, tops)
    _title(figure, whole)
    _legend(figure, shown)
    figure.savefig(path, dpi=120, format="png", facecolor="white")


def _tops(timeline: Timeline) -> dict[Lane, float]:
    """Top of each lane, in rows."""
    tops, top = {}, 0.0
    for lane in Lane:
        tops[lane] = top
        top += timeline.num_rows[lane] + _GAP
    return tops


def _bottom(timeline: Timeline, tops: dict[Lane, float]) -> float:
    return tops[Lane.NETWORK] + timeline.num_rows[Lane.NETWORK]


def _draw_lanes(axes: Axes, timeline: Timeline, tops: dict[Lane, float]) -> None:
    _draw_overlaps(axes, timeline, tops)
    for kind, colour in COLOURS.items():
        of_kind = [bar for bar in timeline.bars if bar.kind is kind]
        for y in sorted({tops[bar.lane] + bar.row for bar in of_kind}):
            spans = [_ms(bar, timeline) for bar in of_kind if tops[bar.lane] + bar.row == y]
            axes.broken_barh(spans, (y + 0.08, 0.84), facecolor=colour, edgecolor=colour, linewidth=0.4)
    _draw_rounds(axes, timeline)
    _draw_labels(axes, timeline, tops)
    _draw_axis(axes, timeline, tops)


def _ms(bar: Bar | RoundFigures, timeline: Timeline) -> tuple[float, float]:
    return (bar.start_ns - timeline.start_ns) / 1e6, (bar.end_ns - bar.start_ns) / 1e6


def _draw_overlaps(axes: Axes, timeline: Timeline, tops: dict[Lane, float]) -> None:
    """Background of draft and verify where both compute."""
    spans = [((start - timeline.start_ns) / 1e6, (end - start) / 1e6) for start, end in timeline.overlaps]
    bottom = tops[Lane.VERIFY] + timeline.num_rows[Lane.VERIFY]
    axes.broken_barh(spans, (tops[Lane.DRAFT], bottom - tops[Lane.DRAFT]), facecolor=_OVERLAP, zorder=0)


def _draw_rounds(axes: Axes, timeline: Timeline) -> None:
    for of_mark, (fill, edge) in MARK_COLOURS.items():
        spans = [_ms(one, timeline) for one in timeline.rounds if one.mark is of_mark]
        axes.broken_barh(spans, (0.04, 0.92), facecolor=fill, edgecolor=edge, linewidth=0.8)
    width_ms = max((timeline.end_ns - timeline.start_ns) / 1e6, 1e-9)
    level = _level(timeline.rounds, width_ms)
    for one in timeline.rounds:
        start_ms, ms = _ms(one, timeline)
        text = next((text for text in one.labels[level:] if _fits(text, ms / width_ms)), None)
        if text:
            axes.text(start_ms + ms / 2, 0.52, text, ha="center", va="center", fontsize=9, color="#1a202c")


def _draw_labels(axes: Axes, timeline: Timeline, tops: dict[Lane, float]) -> None:
    """On bars where they fit; events are marked, and named beside the mark."""
    width_ms = max((timeline.end_ns - timeline.start_ns) / 1e6, 1e-9)
    for bar in timeline.bars:
        start_ms, ms = _ms(bar, timeline)
        y = tops[bar.lane] + bar.row + 0.5
        if bar.kind is BarKind.EVENT:
            axes.plot(start_ms, y, marker="X", color=COLOURS[bar.kind], markersize=9)
            at_right = start_ms > 0.85 * width_ms
            axes.annotate(
                bar.label,
                (start_ms, y),
                xytext=(-8 if at_right else 8, 0),
                textcoords="offset points",
                ha="right" if at_right else "left",
                va="center",
                fontsize=9,
                color=COLOURS[bar.kind],
                parse_math=False,
            )
        elif bar.label and _fits(bar.label, ms / width_ms):
            axes.text(start_ms + ms / 2, y, bar.label, ha="center", va="center", fontsize=8, color="white")


def _level(rounds: Sequence[RoundFigures], width_ms: float) -> int:
    """Index of the longest kind of label that fits most rounds, for a uniform look."""
    for level in range(3):
        fits = [_fits(one.labels[level], (one.end_ns - one.start_ns) / 1e6 / width_ms) for one in rounds]
        if sum(fits) > 0.8 * len(fits):
            return level
    return 3


def _fits(text: str, fraction: float) -> bool:
    return len(text) * _CHARACTER_IN < fraction * _AXES_IN


def _draw_axis(axes: Axes, timeline: Timeline, tops: dict[Lane, float]) -> None:
    centres = [tops[lane] + timeline.num_rows[lane] / 2 for lane in Lane]
    axes.set_yticks(centres, list(Lane), fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(_bottom(timeline, tops) + 0.15, -0.15)
    axes.set_xlim(0, max((timeline.end_ns - timeline.start_ns) / 1e6, 1e-6))
    start = "the start of these rounds" if timeline.is_part else "the start of the generation"
    axes.set_xlabel(f"milliseconds from {start}")
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_strip(axes: Axes, whole: Timeline, shown: Timeline) -> None:
    """All rounds in small, with those drawn below marked."""
    for of_mark, (_, edge) in MARK_COLOURS.items():
        spans = [_ms(one, whole) for one in whole.rounds if one.mark is of_mark]
        axes.broken_barh(spans, (0, 1), facecolor=edge, alpha=0.7, edgecolor="white", linewidth=0.2)
    start, end = ((ns - whole.start_ns) / 1e6 for ns in (shown.start_ns, shown.end_ns))
    axes.axvspan(start, end, ymin=0, ymax=1, fill=False, edgecolor="black", linewidth=1.6, clip_on=False)
    axes.set_xlim(0, (whole.end_ns - whole.start_ns) / 1e6)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["all rounds"], fontsize=9)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xticks([])
    first, last = shown.rounds[0].number, shown.rounds[-1].number
    axes.set_title(f"below: rounds {first} to {last} of {whole.num_rounds}", fontsize=9, loc="left")
    axes.spines[:].set_visible(False)


def _title(figure: Figure, whole: Timeline) -> None:
    found = facts(whole)
    model = found.pop("model")
    stages = list(stage_facts(whole).items())
    starts = range(0, len(stages), _STAGES_A_LINE)
    lines = [list(found.items()), *(stages[i : i + _STAGES_A_LINE] for i in starts)]
    shown = ["   ".join(f"{name}: {value}" for name, value in line) for line in lines]
    text = "\n".join([model, *shown, *whole.notes])
    figure.suptitle(text, fontsize=11, x=0.01, ha="left", parse_math=False)


def _legend(figure: Figure, shown: Timeline) -> None:
    from matplotlib.patches import Patch

    kinds = {bar.kind for bar in shown.bars}
    marks = {one.mark for one in shown.rounds}
    handles: list[Any] = [
        Patch(facecolor=fill, edgecolor=edge, label=MARKS[of_mark])
        for of_mark, (fill, edge) in MARK_COLOURS.items()
        if of_mark in marks
    ]
    handles += [Patch(facecolor=COLOURS[kind], label=LEGEND[kind]) for kind in LEGEND if kind in kinds]
    if shown.overlaps:
        handles.append(Patch(facecolor=_OVERLAP, label="draft and target at once"))
    figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=9, frameon=False)
