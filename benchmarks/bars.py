"""Bars: a number that was measured, the limit it must keep, and the files that say so."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import report


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One promise, and what was found.

    Attributes:
        at_least: the limit is a lower one.
    """

    what: str
    measured: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the measured number keeps the limit."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    @property
    def row(self) -> str:
        """As a row of a Markdown table."""
        unit = f" {self.unit}" if self.unit else ""
        bound = "at least" if self.at_least else "at most"
        verdict = "pass" if self.passed else "MISS"
        return f"| {self.what} | {self.measured:.4g}{unit} | {bound} {self.limit:g}{unit} | {verdict} |"


def table(bars: Sequence[Bar]) -> str:
    """All bars as a Markdown table."""
    return "\n".join(["| bar | measured | limit | |", "|---|---|---|---|", *(bar.row for bar in bars)])


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part of a benchmark found.

    Attributes:
        text: Markdown.
    """

    bars: Sequence[Bar]
    text: str
    data: Any


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one benchmark found.

    Attributes:
        name: of its files.
        about: how it was measured.
        details: Markdown below the bars.
        data: everything, for the JSON.
    """

    name: str
    title: str
    machine: Mapping[str, str]
    about: str
    bars: Sequence[Bar]
    details: str
    data: Mapping[str, Any]

    @classmethod
    def of(
        cls, parts: Mapping[str, Part], *, name: str, title: str, about: str, machine: Mapping[str, str]
    ) -> Report:
        """The report of several parts, by name."""
        return cls(
            name=name,
            title=title,
            machine=machine,
            about=about,
            bars=[bar for part in parts.values() for bar in part.bars],
            details="\n\n".join(part.text for part in parts.values()),
            data={"parts": {each: asdict(part) for each, part in parts.items()}},
        )

    def write(self, out: Path) -> str:
        """Write `<name>.md` and `<name>.json`; returns the Markdown."""
        facts = "; ".join(f"{name}: {value}" for name, value in self.machine.items())
        about = f"Made by `python -m benchmarks.{self.name}`. {facts}.\n\n{self.about}"
        text = "\n\n".join([f"# {self.title}", about, table(self.bars), self.details]) + "\n"
        found = {
            "machine": dict(self.machine),
            "bars": [asdict(bar) | {"passed": bar.passed} for bar in self.bars],
            **self.data,
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{self.name}.md").write_text(text)
        (out / f"{self.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        return text


def earlier(path: Path) -> dict[str, Part]:
    """Parts of the report that is there, by name: a run may measure some of them anew.

    Args:
        path: of its JSON.
    """
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    return {
        name: Part(**part | {"bars": [Bar(**bar) for bar in part["bars"]]}) for name, part in parts.items()
    }


def machine() -> dict[str, str]:
    """`report.machine`, with the modules it loads kept from the garbage collector from then on: looking
    through them takes 0.1 s, in which no request would leave and no answer be read."""
    facts = report.machine()
    gc.freeze()
    return facts
