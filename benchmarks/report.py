"""What all benchmarks report with: medians and ratios of repetitions, limits, and the files that say so."""

from __future__ import annotations

import datetime
import gc
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")


@dataclass(frozen=True, slots=True)
class Summary:
    """Median, least and greatest of some repetitions."""

    median: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        """`median (low to high)` with so many decimals."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def summarise(values: Sequence[float]) -> Summary:
    """Of at least one value."""
    return Summary(statistics.median(values), min(values), max(values))


def ratios(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """value / reference, repetition by repetition: what slows both of one repetition cancels out.

    Raises:
        ValueError: not the same number of repetitions.
    """
    return [value / reference for value, reference in zip(values, references, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One promise, and what was found.

    Attributes:
        measured: None where it was not.
        at_least: the limit is a lower one.
    """

    what: str
    measured: float | None
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether the measured number keeps the limit."""
        if self.measured is None:
            return "not measured"
        kept = self.measured >= self.limit if self.at_least else self.measured <= self.limit
        return "pass" if kept else "MISS"

    @property
    def row(self) -> list[str]:
        """Of a table."""
        unit = f" {self.unit}" if self.unit else ""
        measured = "–" if self.measured is None else f"{self.measured:.4g}{unit}"
        bound = "at least" if self.at_least else "at most"
        return [self.what, measured, f"{bound} {self.limit:g}{unit}", self.verdict]


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers with a fraction have three digits."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one benchmark found.

    Attributes:
        name: of its files.
        machine: facts by name.
        about: how it was measured.
        details: Markdown below the bars.
        data: everything, for the JSON.
        command: that made it, if it is not `python -m benchmarks.NAME`.
    """

    name: str
    title: str
    machine: Mapping[str, str]
    about: str = ""
    bars: Sequence[Bar] = field(default_factory=list)
    details: str
    data: Mapping[str, Any]
    command: str = ""

    @property
    def markdown(self) -> str:
        """All of it."""
        facts = "; ".join(f"{name}: {value}" for name, value in self.machine.items())
        made_by = f"Made by `{self.command or f'python -m benchmarks.{self.name}'}`. {facts}."
        limits = table(["bar", "measured", "limit", ""], [bar.row for bar in self.bars]) if self.bars else ""
        parts = [f"# {self.title}", made_by, self.about, limits, self.details]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, out: Path) -> str:
        """Write `<name>.md` and `<name>.json`, each whole or not at all; returns the Markdown."""
        bars = [asdict(bar) | {"verdict": bar.verdict} for bar in self.bars]
        found = {"machine": dict(self.machine), "bars": bars, **self.data}
        out.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".md", self.markdown), (".json", json.dumps(found, indent=1) + "\n")):
            unfinished = out / f"{self.name}{suffix}.part"
            unfinished.write_text(text)
            unfinished.replace(out / f"{self.name}{suffix}")
        return self.markdown

    def finish(self, out: Path) -> int:
        """Write the files and print the Markdown; the exit status is 1 when a bar is missed."""
        print(self.write(out))
        return int(any(bar.verdict == "MISS" for bar in self.bars))


def machine() -> dict[str, str]:
    """The machine and the versions, without its name or anything else that identifies it.

    The modules that this loads are kept from the garbage collector from then on: looking through them takes
    0.1 s, in which no request would leave and no answer be read.
    """
    import torch
    import transformers

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    name = names[0] if names else "unknown"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gc.freeze()
    return {
        "CPU": f"{os.cpu_count()} cores, {name}, {torch.backends.cpu.get_cpu_capability()}",
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "load average before the run": f"{os.getloadavg()[0]:.1f}",
    }


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
