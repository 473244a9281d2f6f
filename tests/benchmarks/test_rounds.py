"""What a round costs: the report, and the measurement through real processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from benchmarks import load, rounds, rounds_report
from benchmarks.checkouts import HERE, Checkout, Load, version
from benchmarks.rounds import Plan
from benchmarks.rounds_report import DEVICES, MANY, ONE, OTHER, SOME, THIS, Measured
from specwire.errors import ConfigError

COST_MS = {"verify": 0.02, "draft": 0.04, "coordinator": 0.1, "client": 0.1}


def _load(cpu_ms: Mapping[str, float], **changed: float) -> Load:
    figures = {
        "tokens_per_s": 300.0,
        "rounds_per_s": 100.0,
        "tokens_per_round": 3.0,
        "usual_round_ms": 33.0,
        "hit_rate": 0.9,
    }
    by_thread = {name: {"loop": cost_ms, "engine": 0.0, "gRPC": 0.0} for name, cost_ms in cpu_ms.items()}
    return Load(cpu_ms=cpu_ms, thread_cpu_ms=by_thread, **(figures | changed))


def _measured() -> Measured:
    """The other version costs twice as much and is half as fast."""
    doubled = {name: 2 * cost_ms for name, cost_ms in COST_MS.items()}
    measured = Measured.empty([THIS, OTHER], (ONE, SOME, MANY), hits=True)
    for num_streams in measured.bare_ms:
        measured.bare_ms[num_streams].append(0.1)
        measured.loads[THIS][num_streams].append(_load(COST_MS))
        measured.loads[OTHER][num_streams].append(_load(doubled, tokens_per_s=150.0))
    for of_one in measured.hits.values():
        for loads in of_one.values():
            loads.append(_load(COST_MS))
    return measured


def test_bars_compare_with_bare_and_with_the_other_version() -> None:
    """The client's time is not counted; without another version there is no bar that compares with it."""
    measured = _measured()
    found = {bar.what: bar.measured for bar in rounds_report.bars(measured)}
    assert found[f"{MANY} streams: three services over bare"] == pytest.approx(1.6)
    assert found["1 stream: three services over the other version"] == pytest.approx(0.5)
    assert found[f"{MANY} streams: tokens/s over the other"] == pytest.approx(2.0)
    assert found["1 stream, hits, neighbours: round over pass"] == pytest.approx(1.1)
    assert len(found) == 6
    text = rounds_report.details(measured)
    for figures in ("0.160 (0.160 to 0.160)", "0.320 (0.320 to 0.320)", "0.50 (0.50 to 0.50)"):
        assert f"| the three together | {figures} |" in text
    del measured.loads[OTHER]
    assert len(rounds_report.bars(measured)) == 4


def test_services_are_those_of_the_checkout(tmp_path: Path) -> None:
    """Neither the current directory's nor the installed ones."""
    (tmp_path / "verify_service").mkdir()
    (tmp_path / "verify_service/__main__.py").write_text("raise SystemExit(7)")
    with pytest.raises(ConfigError, match="verify_service ended with status 7"):
        Checkout(tmp_path, DEVICES, max_streams=1, num_kv_tokens=1024)


def test_a_version_is_a_path_or_a_commit() -> None:
    with version(str(HERE)) as here:
        assert here == HERE
    with pytest.raises(CalledProcessError), version("no such commit"):
        pass


@pytest.mark.slow
def test_rounds_are_measured_through_real_processes() -> None:
    """Next to nothing to do."""
    counts = (ONE, 4)
    plan = Plan(
        num_repetitions=1,
        num_tokens=dict.fromkeys(counts, 48),
        num_messages=dict.fromkeys(counts, 10),
        num_hit_tokens=24,
    )
    measured = rounds.measure(plan, {THIS: HERE})
    for num_streams in counts:
        [found] = measured.loads[THIS][num_streams]
        assert found.tokens_per_s > 0
        assert 1 <= found.tokens_per_round <= 5
        assert 0.1 < found.services_ms < 1000
        assert 0 < measured.bare_ms[num_streams][0] < 10
        assert sum(found.thread_cpu_ms[name]["engine"] for name in ("verify", "draft")) > 0
    assert all(25 < loads[0].usual_round_ms < 300 for loads in measured.hits[THIS].values())
    assert "| the three together |" in rounds_report.details(measured)


def test_a_window_is_the_time_in_which_all_streams_make_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    window = load.Window(num_streams=2, first=4, last=20)
    for index, num_tokens in ((0, 5), (0, 5), (1, 3)):
        window.add(index, num_tokens)
    assert capsys.readouterr().out == ""
    window.add(1, 1)
    assert capsys.readouterr().out == "{}\n"
    for index, num_tokens in ((0, 5), (1, 5), (0, 5), (1, 5)):
        window.add(index, num_tokens)
    assert capsys.readouterr().out == "{}\n"
    assert (window.num_tokens, window.elapsed_s > 0) == (15, True)


def test_a_window_that_never_begins_is_an_error() -> None:
    window = load.Window(num_streams=2, first=4, last=20)
    with pytest.raises(RuntimeError, match="1 streams have not begun"):
        window.add(0, 20)
