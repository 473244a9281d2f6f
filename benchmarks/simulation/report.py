"""Results as Markdown tables and raw JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.simulation import controller, validation
from benchmarks.simulation.controller import Choice
from benchmarks.simulation.planning import Planned
from benchmarks.simulation.validation import Compared

STEM = Path("benchmarks/results/simulation")


def save(part: str, found: Sequence[Any]) -> dict[str, list[dict[str, Any]]]:
    """Replace one part of the JSON file; returns all of it."""
    path = STEM.with_suffix(".json")
    parts: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    parts[part] = [asdict(each) for each in found]
    path.write_text(json.dumps(parts, indent=1) + "\n")
    return parts


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def validation_table(compared: Sequence[Compared]) -> str:
    """Each point, and how far the simulator was off."""
    off = [abs(done.ratio - 1) for done in compared]
    rows = [
        (
            f"{done.alpha:g}",
            f"{done.draft_ms:g}",
            f"{done.rtt_ms:g}",
            done.num_outcomes,
            done.num_streams,
            "auto" if done.num_draft_tokens is None else done.num_draft_tokens,
            done.rule,
            f"{done.waking:.2f}; {done.work:.2f}",
            f"{statistics.harmonic_mean(done.real):.1f}",
            f"{statistics.harmonic_mean(done.simulated):.1f}",
            f"{done.ratio:.3f}",
        )
        for done in compared
    ]
    head = ("α", "draft ms", "RTT ms", "outcomes", "streams", "γ", "rule", "pace", "real", "simul.", "ratio")
    within = sum(each <= validation.BAR for each in off)
    return (
        f"{within} of {len(off)} points within {validation.BAR:.0%}; off by {statistics.median(off):.1%} "
        f"in the median, {max(off):.1%} at worst. Pace: of waking up and of work here, over what was "
        f"fitted, measured by plain decoding on the same stack.\n\n{table(head, rows)}"
    )


def controller_table(choices: Sequence[Choice]) -> str:
    """The adaptive length against the best fixed one and against plain decoding."""
    rows = [
        (
            done.text,
            f"{done.rtt_ms:g}",
            f"{done.plain:.1f}",
            f"{max(done.fixed.values()):.1f} (γ = {done.best_length})",
            f"{done.chosen:.1f}",
            _marked(done.of_best, done.least_of_best),
            _marked(done.of_plain, controller.LEAST_OF_PLAIN),
            f"{done.young_of_plain:.3f}",
        )
        for done in choices
    ]
    head = ("α", "RTT ms", "plain", "best fixed", "adaptive", "of the best", "of plain", "while it learnt")
    return table(head, rows)


def _marked(value: float, least: float) -> str:
    return f"{value:.3f}" if value >= least else f"**{value:.3f}**"


def planning_table(planned: Sequence[Planned], study: str) -> str:
    """The cases of a study."""
    rows = [
        (
            f"{done.case.alpha:g}",
            done.case.num_streams,
            done.case.way,
            f"{done.case.rtt_ms:g}" if done.case.rtt_ms else "",
            _drafts(done),
            f"{done.found.per_device:.0f}",
            _best_fixed(done),
            f"{done.found.token_ms_p50:.1f}",
            f"{done.found.token_ms_p99:.1f}",
            f"{done.found.num_draft_tokens:.1f}",
            f"{done.found.hit_rate:.2f}",
            f"{done.found.target_busy:.2f}",
            f"{done.found.draft_busy:.2f}" if done.found.draft_busy else "",
        )
        for done in planned
        if done.study == study
    ]
    head = (
        "α",
        "streams",
        "way",
        "RTT ms",
        "drafts",
        "tokens/s",
        "best fixed",
        "p50 ms",
        "p99 ms",
        "γ",
        "hits",
        "target busy",
        "draft busy",
    )
    return table(head, rows)


def _best_fixed(done: Planned) -> str:
    if not done.fixed:
        return ""
    best = max(done.fixed, key=lambda length: done.fixed[length])
    return f"{done.fixed[best]:.0f} (γ = {best})"


def _drafts(done: Planned) -> object:
    return done.case.num_drafts if done.case.way in ("lockstep", "prepared") else ""
