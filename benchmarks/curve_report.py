"""The curve as Markdown tables, raw JSON and one plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import stats, windows
from benchmarks.curve import Curve, Series
from benchmarks.curve_systems import CONTINUOUS
from benchmarks.systems import ASSISTED, NO_SPECULATION, SPECWIRE

_SYSTEMS = {
    SPECWIRE: ("#1f5f99", "o"),
    NO_SPECULATION: ("#7fb2dd", "s"),
    ASSISTED: ("#d98324", "^"),
    CONTINUOUS: ("#7a8793", "D"),
}
"""Colour and marker of each line, in the order of the table."""
_REFERENCES = (NO_SPECULATION, ASSISTED, CONTINUOUS)
_MANY = 16


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A promise and what was measured.

    Attributes:
        what: the ratio of tokens/s and where it was taken.
        least: what it has to reach.
        value: median over repetitions; None when that was not measured.
    """

    what: str
    least: float
    value: float | None

    @property
    def verdict(self) -> str:
        """pass, miss or not measured."""
        if self.value is None:
            return "not measured"
        return "pass" if self.value >= self.least else "miss"


def bars(curves: Sequence[Curve]) -> list[Bar]:
    """Never slower with speculation, on every target; far ahead of others with many streams."""
    widened = {curve.target: curve.series for curve in curves}.get("widened", {})
    of_many = widened.get(_MANY)
    far_ahead = [
        Bar(
            what=f"widened, {_MANY} streams: × {label}",
            least=least,
            value=ratio(of_many, name).median if of_many else None,
        )
        for label, name, least in (("assisted", ASSISTED, 5.0), ("continuous batching", CONTINUOUS, 1.0))
    ]
    never_slower = [
        Bar(what=f"{curve.target}, least of all rows: × without speculation", least=0.98, value=_least(curve))
        for curve in curves
    ]
    return far_ahead + never_slower


def _least(curve: Curve) -> float:
    return min(ratio(of_all, NO_SPECULATION).median for of_all in curve.series.values())


def ratio(of_all: dict[str, Series], reference: str) -> stats.Summary:
    """specwire's tokens/s over another system's, within each repetition."""
    return stats.summarise(stats.ratios(of_all[SPECWIRE].tokens_per_s, of_all[reference].tokens_per_s))


_METHOD = (
    f"So many requests start together, each with a prompt of its own ({windows.LEAST_TOKENS + 1} to "
    f"{windows.MOST_TOKENS + 1} tokens of Python that the pair was not trained on), greedy, with the "
    "same number of output tokens. A cell holds the total output tokens per second, from the first "
    "request to the last token, and the 99th percentile over the requests of the time per output token "
    "as its reader saw it: (end - first chunk) / (tokens - 1). Cells are medians over repetitions; in a "
    "repetition all systems run back to back, and ratios of tokens/s (median, least to greatest) are "
    "taken within it. With few streams a repetition consists of several such bursts. No prompt is "
    "repeated to a server that could find it in its prefix cache.\n\n"
    "specwire is timed at its client, over three processes, with its default number of draft tokens and "
    "without speculation on the same running server; transformers inside its process. Assisted "
    "generation serves one request at a time, so its total rate hardly depends on their number: a "
    "sample of the requests is measured beside every other measurement, with the faster of two "
    "settings, and its time per output token leaves out how long a request waits for its turn. "
    "Continuous batching is `generate_batch` with its manager kept warm. specwire, which finds out by "
    "trials how much to draft, has three unmeasured repetitions at each number of streams first."
)


def write(machine: dict[str, str], curves: Sequence[Curve], out: Path) -> str:
    """Write `curve.md`, `curve.json` and `curve.png`; returns the Markdown.

    Args:
        machine: what it ran on, by fact.
        curves: one a target.
        out: folder for the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(machine, curves)
    (out / "curve.md").write_text(text)
    raw = {"machine": machine, "curves": [asdict(curve) for curve in curves]}
    (out / "curve.json").write_text(json.dumps(raw, indent=1) + "\n")
    plot(curves, out / "curve.png")
    return text


def markdown(machine: dict[str, str], curves: Sequence[Curve]) -> str:
    """The report."""
    parts = [
        "# Many streams on a CPU",
        f"Made by `make bench`. {'; '.join(f'{name}: {value}' for name, value in machine.items())}.",
        "![Total tokens per second against concurrent streams](curve.png)",
        _METHOD,
        *(_table(curve) for curve in curves),
        _bars(curves),
    ]
    return "\n\n".join(parts) + "\n"


def _table(curve: Curve) -> str:
    num_repetitions = len(next(iter(curve.series.values()))[SPECWIRE].tokens_per_s)
    lines = [
        f"## {curve.title}, {curve.num_tokens} tokens a request, {num_repetitions} repetitions",
        "",
        "Tokens/s; p99 time per output token in ms.",
        "",
        "| streams | specwire | without speculation | assisted | continuous batching "
        "| × without speculation | × assisted | × continuous batching |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for num_streams, of_all in curve.series.items():
        cells = [
            str(num_streams),
            *(_cell(of_all[name]) for name in _SYSTEMS),
            *(ratio(of_all, name).text(2) for name in _REFERENCES),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    same = ", ".join(f"{name} {count}" for name, count in curve.identical.items())
    return "\n".join(lines) + (
        f"\n\nAssisted generation: {curve.assisted_setting}. Prompts of {curve.num_compared}, all at once, "
        f"with specwire's very tokens: {same}."
    )


def _cell(series: Series) -> str:
    rate = stats.summarise(series.tokens_per_s).median
    tpot_ms = stats.summarise(series.p99_tpot_ms).median
    return f"{rate:,.0f}; {tpot_ms:.1f}" if rate >= 100 else f"{rate:.1f}; {tpot_ms:.1f}"


def _bars(curves: Sequence[Curve]) -> str:
    lines = ["## Goals", "", "| ratio of tokens/s | goal | measured | |", "|---|---|---|---|"]
    for bar in bars(curves):
        value = "" if bar.value is None else f"{bar.value:.2f}"
        lines.append(f"| {bar.what} | ≥ {bar.least:g} | {value} | {bar.verdict} |")
    return "\n".join(lines)


def plot(curves: Sequence[Curve], path: Path) -> None:
    """One panel a target; whiskers span repetitions."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5.6 * len(curves), 4.4), squeeze=False)
    for axis, curve in zip(axes[0], curves, strict=True):
        _panel(axis, curve)
    axes[0][0].set_ylabel("output tokens per second, all streams")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axis: Any, curve: Curve) -> None:
    places = list(curve.series)
    for name, (colour, marker) in reversed(_SYSTEMS.items()):  # the last one drawn lies on top
        found = [stats.summarise(of_all[name].tokens_per_s) for of_all in curve.series.values()]
        medians = [summary.median for summary in found]
        below = [summary.median - summary.low for summary in found]
        above = [summary.high - summary.median for summary in found]
        axis.errorbar(
            places,
            medians,
            yerr=[below, above],
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.8,
            elinewidth=1,
            capsize=2,
            label=name,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(places, [str(place) for place in places])
    axis.set_xlabel("concurrent streams")
    axis.set_ylim(bottom=0)
    axis.set_title(curve.title, fontsize=11)
    axis.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
