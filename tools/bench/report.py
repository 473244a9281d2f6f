"""Output of a measurement: table, JSON, plot, and a progress bar while it runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwire.cli.terminal import passes
from tools.bench.metrics import (
    METRICS,
    PERCENTILES,
    RequestRecord,
    Summary,
    latencies_ms,
    output_rate,
    running_requests,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_BINS = 60
_NUM_ERRORS_SHOWN = 3
_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"


def table(summary: Summary, records: Sequence[RequestRecord]) -> str:
    lines = [f"{name:<18} {value}" for name, value in _rows(summary)]
    columns = ("mean", "median", *(f"p{p}" for p in PERCENTILES if p != 50))
    lines += ["", f"{'milliseconds':<44}" + "".join(f"{column:>10}" for column in columns)]
    for name, about in METRICS.items():
        of = summary.latencies[name]
        cells = [f"{of[column]:.2f}" if of else "-" for column in columns]
        lines.append(f"{name.upper():<5} {about:<38}" + "".join(f"{cell:>10}" for cell in cells))
    # A few distinct error messages, which say more than counts.
    messages = list(dict.fromkeys(record.error for record in records if not record.completed))
    lines += ["", *(f"error: {message}" for message in messages[:_NUM_ERRORS_SHOWN])] if messages else []
    if len(messages) > _NUM_ERRORS_SHOWN:
        lines.append(f"... and {len(messages) - _NUM_ERRORS_SHOWN} other messages")
    return "\n".join(lines)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    counts = ", ".join(f"{count} {status}" for status, count in sorted(summary.errors.items()))
    failed = f"{summary.failed} failed ({counts})" if counts else f"{summary.failed} failed"
    rows = [
        ("requests", f"{summary.completed} completed, {failed}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("tokens", f"{summary.total_input_tokens} in, {summary.total_output_tokens} out"),
        ("request throughput", f"{summary.request_throughput:.2f} requests/s"),
        ("output throughput", f"{summary.output_throughput:.1f} tokens/s"),
        ("total throughput", f"{summary.total_token_throughput:.1f} tokens/s, input counted"),
        ("most at a time", f"{summary.max_concurrent_requests} requests"),
    ]
    if summary.request_goodput is not None:
        good = f"{summary.num_good} of {summary.completed} met every objective"
        rows.insert(4, ("request goodput", f"{summary.request_goodput:.2f} requests/s ({good})"))
    if summary.num_refusals:
        rows.append(("refused", f"{summary.num_refusals} times, with RESOURCE_EXHAUSTED"))
    if summary.max_send_delay_ms is not None:
        rows.append(("send delay", f"{summary.max_send_delay_ms:.1f} ms at most, sender against schedule"))
    return rows + _acceptance(summary)


def _acceptance(summary: Summary) -> list[tuple[str, str]]:
    total = summary.speculation
    if not total.num_rounds:  # OpenAI's API does not say
        return []
    num_drafts = total.num_drafts
    if not num_drafts:
        why = total.why_plain or "no draft tokens"
        return [("acceptance", f"- ({why})")] if summary.completed else []
    by_position = " ".join(f"{n / num_drafts:.2f}" for n in total.accepted_per_position)
    rows = [
        ("passes", passes(total)),
        ("acceptance rate", f"{total.draft_acceptance_rate:.2f}, of all drafts by position {by_position}"),
    ]
    if total.draft_unavailable:
        rows.append(("draft", f"not used at times: {total.draft_unavailable}"))
    elif total.why_plain:
        rows.append(("decoded plainly", f"at times: {total.why_plain}"))
    return rows


def result(
    settings: dict[str, Any], summary: Summary, records: Sequence[RequestRecord], *, detailed: bool
) -> dict[str, Any]:
    """JSON-ready: settings, figures and, if requested, one entry for each request.

    The lists have vLLM's names and, as there, hold seconds; they are ordered by the time of sending.
    """
    found = settings | summary.to_dict()
    if not detailed:
        return found
    records = sorted(records, key=lambda record: record.start_s)
    return found | {
        "start_times": [record.start_s for record in records],
        "input_lens": [record.num_input_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "ttfts": [record.ttft_ms / 1e3 if record.completed else None for record in records],
        "itls": [[ms / 1e3 for ms in record.itls_ms] for record in records],
        "chunk_tokens": [list(record.chunk_tokens) for record in records],
        "latencies": [record.e2el_ms / 1e3 if record.completed else None for record in records],
        "statuses": [record.status for record in records],
        "errors": [record.error for record in records],
        "generated_texts": [record.text for record in records],
    }


def plot(path: Path, summary: Summary, records: Sequence[RequestRecord], title: str) -> None:
    """Write two panels: latencies from median to p99, and tokens per second over time.

    The format follows the name: .png, .svg, .pdf.
    """
    from matplotlib.figure import Figure  # not pyplot: no window system, no state

    done = [record for record in records if record.completed]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _plot_latencies(left, done, summary)
    _plot_throughput(right, done, summary)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def _plot_latencies(axes: Axes, done: Sequence[RequestRecord], summary: Summary) -> None:
    """A row for each latency: every value as a faint tick, the percentiles as dots with their numbers."""
    for row, name in enumerate(METRICS):
        of = summary.latencies[name]
        if not of:
            continue
        values = latencies_ms(done, name)
        axes.scatter(values, [row] * len(values), marker="|", s=60, color=_GREY, alpha=0.15, linewidths=1)
        levels = [of[f"p{level}"] for level in PERCENTILES]
        axes.plot([levels[0], levels[-1]], [row, row], color=_BLUE, linewidth=2)
        axes.scatter(levels, [row] * len(levels), color=[_BLUE, _BLUE, _ORANGE], s=28, zorder=3)
        numbers = ", ".join(_short(level) for level in levels)
        axes.annotate(numbers, (levels[1], row), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axes.set_yticks(range(len(METRICS)), [name.upper() for name in METRICS])
    axes.set_ylim(len(METRICS) - 0.5, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.margins(x=0.15)
    axes.set_xlabel("milliseconds")
    axes.set_title("Latency: p50, p90, p99; ticks are single values", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    """Three digits, but no exponent: 0.614, 61.4, 1207."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _plot_throughput(axes: Axes, done: Sequence[RequestRecord], summary: Summary) -> None:
    from matplotlib.ticker import MaxNLocator

    bin_s = max(summary.duration_s / _NUM_BINS, 1e-3)
    rate = output_rate(done, bin_s)
    edges = [bin_s * i for i in range(len(rate) + 1)]
    axes.stairs(rate, edges, fill=True, color=_BLUE, alpha=0.45)
    axes.axhline(summary.output_throughput, color=_BLUE, linewidth=1.2, linestyle="--")
    axes.set_ylabel("output tokens/s (dashed: over all)", color=_BLUE)
    axes.set_xlabel("seconds")
    axes.set_title("Throughput and requests running", fontsize=10)
    running = axes.twinx()
    points = [(0.0, 0), *running_requests(done)]
    running.step([t for t, _ in points], [n for _, n in points], where="post", color=_ORANGE, linewidth=1.2)
    running.yaxis.set_major_locator(MaxNLocator(integer=True))
    running.set_ylabel("requests running", color=_ORANGE)
    for panel in (axes, running):
        panel.set_ylim(bottom=0)
        panel.spines["top"].set_visible(False)
    axes.set_xlim(0, max(summary.duration_s, bin_s))


@contextlib.contextmanager
def progress(total: int, *, disabled: bool) -> Iterator[Callable[[RequestRecord], None]]:
    """What each request that ended is told to: a bar on a terminal, if tqdm is installed; else nothing."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        yield lambda _: None
        return
    num_failed = 0
    with tqdm(total=total, unit=" requests", leave=False, disable=disabled or not sys.stderr.isatty()) as bar:

        def update(record: RequestRecord) -> None:
            nonlocal num_failed
            num_failed += not record.completed
            if num_failed:
                bar.set_postfix(failed=num_failed, refresh=False)
            bar.update()

        yield update
