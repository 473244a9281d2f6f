"""The GPU benchmark's dry run on a CPU, and what it leaves when something is missing or it is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import report
from benchmarks.gpu.findings import Findings
from benchmarks.names import ASSISTED, LOCKSTEP, NO_SPECULATION, PLAIN, PREPARED, SPECWIRE
from benchmarks.report import Summary

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_a_dry_run_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--shape", "tiny", "--cache", str(tmp_path / "cache")]
    status = gpu.main([*words, "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert (status, found["problems"]) == (0, [])
    assert {"recurrent layers of qwen3_next", "recurrent layers of mamba2"} < found["facts"].keys()
    own = ["heads", "dflash", "eagle3", "layers"]
    sizes = ["1 × 1", "1 × 6", "2 × 6", *(f"1 × 6, with {source}" for source in own)]
    assert list(found["verify_ms"]) == sizes
    assert list(found["draft_ms"]) == ["0", "1"]
    assert list(found["own_ms"]) == own
    assert list(found["adapters_ms"]) == [f"1 × 6, {kind}" for kind in ("none", "mixed", "one")]
    assert list(found["gap_ms"]) == ["target", "draft"]
    assert found["weights_bytes"] > 5e6
    for temperature in ("0", "1"):
        ours = {NO_SPECULATION, SPECWIRE, LOCKSTEP, PREPARED}
        assert ours | {PLAIN, ASSISTED} <= found["rates"][temperature].keys()
        assert found["stages_ms"][temperature].keys() == ours
    shares = [value for name, value in found["correctness"].items() if "share" in name]
    assert len(shares) == 2
    assert min(shares) > 0.9
    assert {bar["verdict"] for bar in found["bars"]} <= {"pass", "MISS"}
    assert (tmp_path / "out" / "gpu.md").read_text() in capsys.readouterr().out


def _some() -> Findings:
    """As after the passes."""
    findings = Findings(facts={"device": "X"}, bandwidth_gb_s=4000.0, weights_bytes=16_000_000_000)
    findings.verify_ms = {"1 × 6": Summary(4.4, 4.3, 4.5), "64 × 6": Summary(9.0, 8.0, 10.0)}
    findings.draft_ms = {"0": Summary(0.4, 0.3, 0.5), "1": Summary(1.2, 1.1, 1.3)}
    return findings


def test_a_killed_run_leaves_what_it_had(tmp_path: Path) -> None:
    text = report.write(_some(), tmp_path)
    assert "| verify pass of 6 tokens × (weights ÷ bandwidth) | 1.1 | at most 1.15 | pass |" in text
    assert "| draft step | 1.2 ms | at most 1 ms | MISS |" in text
    assert text.count("not measured") == 3
    assert json.loads((tmp_path / "gpu.json").read_text())["bound_ms"] == 4.0
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.md", "gpu.json"}


def test_speedups_are_those_of_the_default(tmp_path: Path) -> None:
    findings = _some()
    findings.rates = {
        "0": {PLAIN: [20.0, 40.0, 30.0], LOCKSTEP: [130.0], SPECWIRE: [120.0]},
        "1": {PLAIN: [30.0]},
    }
    verdicts = [(bar.measured, bar.verdict) for bar in report.bars(findings)]
    assert verdicts[:2] == [(4.0, "pass"), (None, "not measured")]
    assert "| 0 | specwire | 120.0 (120.0 to 120.0) | 4.00 |" in report.write(findings, tmp_path)


def test_a_part_that_fails_is_named_and_the_others_go_on() -> None:
    said: list[str] = []
    modules: dict[str, Any] = {}
    findings = Findings()
    assert findings.phase("services", lambda: modules["grpc_health"], said.append) is None
    assert findings.phase("passes", lambda: 7, said.append) == 7
    assert findings.problems == ["services: KeyError: 'grpc_health'"]
    assert list(findings.seconds) == ["services", "passes"]
    assert "Not measured" in report.report(findings).markdown
