"""`benchmarks.choice`: its ratios, and one point of it with real services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import choice
from benchmarks.choice import AUTO, PLAIN, SERVICE, Measured, Point


def test_ratios_are_those_within_a_turn() -> None:
    """The machine was twice as fast in the second turn."""
    rates = {AUTO: [110.0, 198.0, 110.0], PLAIN: [100.0, 200.0, 100.0], "4 tokens": [120.0, 240.0, 121.0]}
    found = Measured(Point("embedded", 16, "greedy"), learning=[0.5, 0.7, 1.0, 1.2], rates=rates)
    assert found.over(PLAIN) == pytest.approx(1.1)
    assert found.row == (
        "| embedded | 16 | greedy | 0.60, 1.10 | 1.10 | 0.91 (4 tokens) "
        "| 110 | 100 | - | 121 | - | - | - | - | - |"
    )


@pytest.mark.slow
def test_a_point_is_measured_with_real_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choice, "NUM_TOKENS", 8)
    monkeypatch.setattr(choice, "NUM_LEARNING_TOKENS", 32)
    out = tmp_path / "choice.md"
    options = [
        "--pairs",
        "embedded",
        "--streams",
        "1",
        "--rules",
        "rejection",
        "--turns",
        "1",
        "--out",
        str(out),
    ]
    assert choice.main(options) == 0
    assert out.read_text() == capsys.readouterr().out
    (found,) = json.loads(out.with_suffix(".json").read_text())
    assert found["point"] == {"pair": "embedded", "num_streams": 1, "rule": "rejection"}
    assert len(found["learning"]) == 4
    assert set(found["rates"]) == {
        AUTO,
        PLAIN,
        "2 tokens",
        "4 tokens",
        "8 tokens",
        SERVICE,
        f"{SERVICE}, 4 tokens",
    }
