"""What the tests here measured, as a table: printed at the end of a run, and kept by `make chaos`."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks/results/chaos.md"
_HEAD = """# Faults, as measured by `make chaos`

| case | outcome | measured |
|---|---|---|
"""
_rows: dict[str, tuple[str, str]] = {}


def note(case: str, outcome: str, measured: str = "") -> None:
    """One row; the last word on a case counts."""
    _rows[case] = outcome, measured


def table() -> str:
    """All rows in Markdown; empty when there are none."""
    lines = [f"| {case} | {outcome} | {measured} |" for case, (outcome, measured) in _rows.items()]
    return _HEAD + "\n".join(lines) + "\n" if lines else ""
