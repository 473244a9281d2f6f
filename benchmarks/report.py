"""What was measured as a Markdown table, raw JSON and a bar chart."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import stats
from benchmarks.measure import Comparison, Series
from benchmarks.systems import ASSISTED, ASSISTED_CONSTANT, NO_SPECULATION, PLAIN, SPECWIRE
from benchmarks.volume import Volume

_COLOURS = {
    PLAIN: "#9aa5b1",
    ASSISTED: "#f0b775",
    ASSISTED_CONSTANT: "#d98324",
    NO_SPECULATION: "#9cc3e6",
    SPECWIRE: "#1f5f99",
}


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything one run measured.

    Attributes:
        machine: what it ran on, by fact.
        assisted_tokens: guesses of the assisted generation with a constant number.
        volumes: measured bytes a round by rule.
        synthetic_bytes: computed bytes a round by rule, large vocabulary.
    """

    machine: dict[str, str]
    assisted_tokens: int
    comparisons: list[Comparison]
    volumes: dict[str, Volume]
    synthetic_bytes: dict[str, int]


def machine() -> dict[str, str]:
    """The machine and the versions, without its name or anything else that identifies it."""
    import torch
    import transformers

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    name = names[0] if names else "unknown"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "CPU": f"{os.cpu_count()} cores, {name}, {torch.backends.cpu.get_cpu_capability()}",
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "load average before the run": f"{os.getloadavg()[0]:.1f}",
    }


def best_assisted(comparison: Comparison) -> str:
    """The faster of transformers' own settings on this target and temperature, by the median."""
    names = [name for name in (ASSISTED, ASSISTED_CONSTANT) if name in comparison.series]
    return max(names, key=lambda name: stats.summarise(comparison.series[name].tokens_per_s).median)


def write(results: Results, out: Path) -> str:
    """Write `cpu.md`, `cpu.json` and `cpu.png`; returns the Markdown."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    (out / "cpu.md").write_text(text)
    (out / "cpu.json").write_text(json.dumps(asdict(results), indent=1) + "\n")
    plot(results.comparisons, out / "cpu.png")
    return text


def markdown(results: Results) -> str:
    """The report. Rates are medians over repetitions with the least and the greatest."""
    parts = [
        "# One stream on a CPU",
        _paragraph(results),
        *(_comparison(comparison) for comparison in results.comparisons),
        _overhead(results.comparisons),
        _bytes(results),
        "![Tokens per second](cpu.png)",
    ]
    return "\n\n".join(parts) + "\n"


def _paragraph(results: Results) -> str:
    facts = "; ".join(f"{name}: {value}" for name, value in results.machine.items())
    series = next(iter(results.comparisons[0].series.values()))
    return (
        f"Made by `make bench`. {facts}.\n\n"
        f"One stream; the same prompts, number of tokens, threads for the target and number formats for "
        f"all (draft in float32); "
        f"{len(series.tokens_per_s)} interleaved repetitions of {len(series.token_ids)} prompts after a "
        "warm-up. Rates are medians (least to greatest). Ratios are taken within each repetition. "
        "specwire is timed at its client, over three processes; transformers inside its process. "
        f"Assisted generation runs with its defaults (20 guesses, cut at a confidence of 0.4) and with a "
        f"constant {results.assisted_tokens}; the faster one is *best assisted*."
    )


def _comparison(comparison: Comparison) -> str:
    mode = "greedy" if comparison.temperature == 0 else f"temperature {comparison.temperature:g}"
    plain = comparison.series[PLAIN].tokens_per_s
    assisted = comparison.series[best_assisted(comparison)].tokens_per_s
    lines = [
        f"## {comparison.target}, {mode}, {comparison.num_tokens} tokens",
        "",
        "| system | tokens/s | × plain generate | × best assisted | tokens a target pass |",
        "|---|---|---|---|---|",
    ]
    for name, series in comparison.series.items():
        cells = [
            name,
            stats.summarise(series.tokens_per_s).text(0 if plain[0] > 100 else 1),
            stats.summarise(stats.ratios(series.tokens_per_s, plain)).text(2),
            stats.summarise(stats.ratios(series.tokens_per_s, assisted)).text(2),
            f"{stats.summarise(series.tokens_per_pass).median:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if comparison.temperature == 0:
        lines += ["", _same_text(comparison)]
    return "\n".join(lines)


def _same_text(comparison: Comparison) -> str:
    reference = comparison.series[PLAIN].token_ids
    counts = [
        f"{name} {sum(map(_equal, series.token_ids, reference))}"
        for name, series in comparison.series.items()
        if name != PLAIN
    ]
    return f"Prompts of {len(reference)} with plain generate's very tokens: {', '.join(counts)}."


def _equal(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    return list(ours) == list(theirs)


def _overhead(comparisons: Sequence[Comparison]) -> str:
    lines = [
        "## The coordinator's own time a round",
        "",
        "All that is neither spent in a model service nor on the way to one, against two bare grpc.aio "
        "stream round trips of 1 KB measured in the same repetition.",
        "",
        "| target, temperature | own time (ms) | two round trips (ms) | ratio |",
        "|---|---|---|---|",
    ]
    for comparison in comparisons:
        own = comparison.series[SPECWIRE].own_ms_per_round
        echoes = comparison.two_echoes_ms
        cells = [
            f"{comparison.target}, {comparison.temperature:g}",
            stats.summarise(own).text(2),
            stats.summarise(echoes).text(2),
            stats.summarise(stats.ratios(own, echoes)).text(2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _bytes(results: Results) -> str:
    lines = [
        "## Bytes a round",
        "",
        "| what | rule | draft and verify links, both ways | to the client |",
        "|---|---|---|---|",
    ]
    for mode, volume in results.volumes.items():
        what = f"embedded pair, {volume.num_draft_tokens:.1f} draft tokens, traced"
        lines.append(f"| {what} | {mode} | {volume.model_bytes:,.0f} | {volume.client_bytes:,.0f} |")
    for mode, num_bytes in results.synthetic_bytes.items():
        lines.append(f"| messages for a vocabulary of 151,936, 5 draft tokens | {mode} | {num_bytes:,} | |")
    return "\n".join(lines)


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """One panel a target, since their rates differ by an order of magnitude; whiskers span repetitions."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    targets = list(dict.fromkeys(comparison.target for comparison in comparisons))
    figure, axes = pyplot.subplots(1, len(targets), figsize=(5.6 * len(targets), 4.2), squeeze=False)
    for axis, target in zip(axes[0], targets, strict=True):
        _panel(axis, [comparison for comparison in comparisons if comparison.target == target])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axis: Any, comparisons: Sequence[Comparison]) -> None:
    names = list(comparisons[0].series)
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        offset = (i - (len(names) - 1) / 2) * width
        found = [_whiskers(comparison.series[name]) for comparison in comparisons]
        places = [place + offset for place in range(len(comparisons))]
        heights, below, above = zip(*found, strict=True)
        error = {"ecolor": "#333333", "elinewidth": 1, "capsize": 2}
        axis.bar(places, heights, width * 0.94, color=_COLOURS[name], label=name)
        axis.errorbar(places, heights, yerr=[below, above], fmt="none", **error)
        for place, height, reach in zip(places, heights, above, strict=True):
            text, up = f"{height:.0f}", {"xytext": (0, 3), "textcoords": "offset points"}
            axis.annotate(text, (place, height + reach), ha="center", va="bottom", fontsize=8, **up)
    modes = ["greedy" if c.temperature == 0 else f"temperature {c.temperature:g}" for c in comparisons]
    axis.set_xticks(range(len(modes)), modes)
    axis.set_title(comparisons[0].target, fontsize=11)
    axis.set_ylabel("tokens per second")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.12)


def _whiskers(series: Series) -> tuple[float, float, float]:
    """Height of the bar, and how far its whiskers reach down and up."""
    summary = stats.summarise(series.tokens_per_s)
    return summary.median, summary.median - summary.low, summary.high - summary.median
