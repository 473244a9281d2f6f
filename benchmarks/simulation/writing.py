"""From the JSON file to the tables and plots, whichever parts it has."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.simulation import plots, report
from benchmarks.simulation.controller import Choice, Text
from benchmarks.simulation.planning import Case, Planned
from benchmarks.simulation.report import STEM
from benchmarks.simulation.validation import Compared
from benchmarks.simulation.workload import Steady

_STUDIES = {
    "distance": "16 streams of a target device, by distance",
    "load": "Few and many streams, drafts 20 ms away",
    "slow draft": "A draft of three times the cost",
    "drafts": "How many drafts 64 streams need, 20 ms away",
    "whole": "10,048 streams, 64 target devices, 256 drafts that all share; a fixed length of 2",
}


def write() -> None:
    """All parts that were run."""
    parts = _saved()
    sections = ["# Simulation", "Tokens/s throughout; made by `python -m benchmarks.simulation`."]
    if "validation" in parts:
        compared = [Compared(**part) for part in parts["validation"]]
        sections += ["## The simulator against the running system", report.validation_table(compared)]
        plots.agreement(compared, STEM.with_name("simulation-agreement.png"))
    if "controller" in parts:
        choices = [_choice(part) for part in parts["controller"]]
        sections += ["## The adaptive length, one stream", report.controller_table(choices)]
    planned = [_planned(part) for name in ("planning", "whole") for part in parts.get(name, [])]
    for study, title in _STUDIES.items():
        if any(done.study == study for done in planned):
            sections += [f"## {title}", report.planning_table(planned, study)]
    if "planning" in parts:
        plots.distance(planned, STEM.with_name("simulation-distance.png"))
        plots.load(planned, STEM.with_name("simulation-load.png"))
    STEM.with_suffix(".md").write_text("\n\n".join(sections) + "\n")


def choices_so_far() -> list[Choice]:
    """As they were saved."""
    return [_choice(part) for part in _saved()["controller"]]


def planned_so_far() -> list[Planned]:
    """As they were saved."""
    return [_planned(part) for part in _saved()["planning"]]


def _saved() -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(STEM.with_suffix(".json").read_text())
    return parts


def _choice(part: dict[str, Any]) -> Choice:
    return Choice(
        **part
        | {
            "text": Text(**part["text"]),
            "fixed": {int(length): rate for length, rate in part["fixed"].items()},
        }
    )


def _planned(part: dict[str, Any]) -> Planned:
    nouns = {"case": Case(**part["case"]), "found": Steady(**part["found"])}
    return Planned(**part | nouns | {"fixed": {int(n): rate for n, rate in part["fixed"].items()}})
