"""What the tests here measured, as a table: `make chaos` prints it and keeps it."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks/results/chaos.md"
_HEAD = """# Faults, as measured by `make chaos`

What each row is about: [docs/faults.md](../../docs/faults.md).

"""
_TABLE = """| case | outcome | measured |
|---|---|---|
"""
_rows: dict[str, str] = {}


def note(case: str, outcome: str, measured: str = "") -> None:
    """One row; the last word on a case counts."""
    _rows[case] = f"| {case} | {outcome} | {measured} |"


def keep() -> str:
    """Add this run's rows to the file, in place of older ones on the same cases; returns this run's. What is
    written above the table stays."""
    rows, head = dict(_rows), _HEAD
    if RESULTS.exists():
        said, _, table = RESULTS.read_text().partition(_TABLE)
        kept = [line for line in table.splitlines() if line.startswith("| ")]
        rows = {line.split(" | ")[0].removeprefix("| "): line for line in kept} | rows
        head = said
    RESULTS.write_text(head + _TABLE + "\n".join(rows.values()) + "\n")
    return "\n".join(_rows.values()) + "\n"
