"""Where separation pays, in pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.simulation.planning import ALONE, COLOCATED, LOCKSTEP, PREPARED, Planned
from benchmarks.simulation.validation import BAR, Compared

mpl.use("Agg")

from matplotlib import pyplot as plt

_COLOURS = {ALONE: "#7a8793", COLOCATED: "#d98324", LOCKSTEP: "#7fb2dd", PREPARED: "#1f5f99"}


def distance(planned: Sequence[Planned], path: Path) -> None:
    """Tokens/s and p99 over the distance, for the middle alpha."""
    cases = [done for done in planned if done.study == "distance" and done.case.alpha == 0.7]
    figure, (rates, tails) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rtts = sorted({done.case.rtt_ms for done in cases if done.case.rtt_ms})
    for axes, name in ((rates, "per_device"), (tails, "token_ms_p99")):
        for way in (ALONE, COLOCATED):
            level = next(getattr(done.found, name) for done in cases if done.case.way == way)
            axes.axhline(level, color=_COLOURS[way], linestyle="--", label=way)
        for way in (LOCKSTEP, PREPARED):
            by_rtt = {done.case.rtt_ms: getattr(done.found, name) for done in cases if done.case.way == way}
            values = [by_rtt[rtt] for rtt in rtts]
            axes.plot(rtts, values, color=_COLOURS[way], marker="o", label=f"separate, {way}")
        axes.set_xscale("log")
        axes.set_xticks(rtts, [f"{rtt:g}" for rtt in rtts], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("round trip to the draft, ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rates.set_title("tokens/s of a target device (16 streams, α 0.7)")
    tails.set_title("time for a token, 99th percentile, ms")
    rates.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def load(planned: Sequence[Planned], path: Path) -> None:
    """Tokens/s over plain decoding, by streams of a device."""
    cases = [done for done in planned if done.study == "load"]
    sizes = sorted({done.case.num_streams for done in cases})
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    alone = {done.case.num_streams: done.found.per_device for done in cases if done.case.way == ALONE}
    for i, way in enumerate((COLOCATED, LOCKSTEP, PREPARED)):
        found = {done.case.num_streams: done.found.per_device for done in cases if done.case.way == way}
        places = [at + 0.26 * (i - 1) for at in range(len(sizes))]
        heights = [found[size] / alone[size] for size in sizes]
        bars = axes.bar(places, heights, 0.24, color=_COLOURS[way], label=way)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1, color=_COLOURS[ALONE], linestyle="--", label=ALONE)
    axes.set_xticks(range(len(sizes)), [f"{size}" for size in sizes])
    axes.set_xlabel("streams of a target device (α 0.7; separate drafts 20 ms away)")
    axes.set_ylabel("tokens/s over the target alone")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def agreement(compared: Sequence[Compared], path: Path) -> None:
    """Simulated over real, by real tokens/s."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.axhspan(1 - BAR, 1 + BAR, color="#1f5f99", alpha=0.1, label=f"within {BAR:.0%}")
    for num_outcomes, name, marker in ((0, "lockstep", "o"), (16, "prepared", "^")):
        points = [done for done in compared if done.num_outcomes == num_outcomes]
        rates = [sum(done.real) / len(done.real) for done in points]
        colour = _COLOURS[PREPARED if num_outcomes else LOCKSTEP]
        axes.scatter(rates, [done.ratio for done in points], color=colour, marker=marker, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("tokens/s in the running system")
    axes.set_ylabel("simulated over real")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
