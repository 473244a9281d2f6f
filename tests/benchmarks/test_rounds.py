"""What a round costs: the arithmetic of a host, and the measurement through real processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import rounds
from benchmarks.checkouts import HERE, PROCESSES, Checkout, Load
from benchmarks.rounds import MANY, ONE, OTHER, SOME, THIS, Measured, Plan
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


def _measured(bare_ms: float = 0.1) -> Measured:
    """The other version costs twice as much and is half as fast."""
    doubled = {name: 2 * cost_ms for name, cost_ms in COST_MS.items()}
    plan = Plan(num_repetitions=1)
    measured = Measured.empty(plan, [THIS, OTHER])
    for num_streams in plan.num_tokens:
        measured.bare_ms[num_streams].append(bare_ms)
        measured.loads[THIS][num_streams].append(_load(COST_MS))
        measured.loads[OTHER][num_streams].append(_load(doubled, tokens_per_s=150.0))
    for of_one in measured.hits.values():
        for loads in of_one.values():
            loads.append(_load(COST_MS))
    return measured


def test_a_host_needs_a_round_of_every_stream_in_each_pass() -> None:
    """By hand: 256 streams, 16 ms a pass, 16,000 rounds a second; a coordinator's share is 1.6 cores, at most
    0.8 of one a process."""
    found = rounds.need(COST_MS, pass_ms=16.0, num_streams=256)
    assert found.rounds_per_s == 16_000
    assert found.num_processes == {"verify": 1, "draft": 1, "coordinator": 2}
    assert found.num_cores == pytest.approx(16 * 0.16)
    assert found.share == 1.0
    assert rounds.served_per_s(0.1) == pytest.approx(8_000)


def test_a_host_that_is_too_small_serves_a_share() -> None:
    found = rounds.need(COST_MS, pass_ms=1.0, num_streams=160)
    assert found.num_cores == pytest.approx(25.6)
    assert found.share == pytest.approx(0.5)


def test_bars_compare_with_bare_and_with_the_other_version() -> None:
    """The client's time is not counted; without another version there is no bar that compares with it."""
    measured = _measured()
    found = {bar.what: bar.measured for bar in rounds.bars(measured)}
    assert found[f"{MANY} streams: three services over bare"] == pytest.approx(1.6)
    assert found["1 stream: three services over the other version"] == pytest.approx(0.5)
    assert found[f"{MANY} streams: tokens/s over the other"] == pytest.approx(2.0)
    assert found["1 stream, hits, neighbours: round over pass"] == pytest.approx(1.1)
    assert len(found) == 6
    del measured.loads[OTHER]
    assert len(rounds.bars(measured)) == 4


def test_every_number_of_streams_is_in_the_tables() -> None:
    text = rounds.details(_measured())
    for version in (THIS, OTHER):
        for num_streams in (ONE, SOME, MANY):
            assert f"| {num_streams} | {version} |" in text
    assert "| 5 | 1,024 | 204,800 | 6 | 11 | 26 |" in text


def test_services_are_those_of_the_checkout(tmp_path: Path) -> None:
    """Neither the current directory's nor the installed ones."""
    (tmp_path / "verify_service").mkdir()
    (tmp_path / "verify_service/__main__.py").write_text("raise SystemExit(7)")
    with pytest.raises(ConfigError, match="verify_service ended with status 7"):
        Checkout(tmp_path, rounds.DEVICES, max_streams=1, num_kv_tokens=1024)


@pytest.mark.slow
def test_rounds_are_measured_through_real_processes() -> None:
    """Next to nothing to do."""
    plan = Plan(
        num_repetitions=1,
        num_tokens={ONE: 8, SOME: 8, MANY: 4},
        num_messages=dict.fromkeys((ONE, SOME, MANY), 1),
        num_hit_tokens=24,
    )
    measured = rounds.measure(plan, {THIS: HERE})
    for num_streams in plan.num_tokens:
        [load] = measured.loads[THIS][num_streams]
        assert load.tokens_per_s > 0
        assert 1 <= load.tokens_per_round <= 5
        assert 0.1 < load.services_ms < 1000
        assert 0 < measured.bare_ms[num_streams][0] < 10
    [many] = measured.loads[THIS][MANY]
    assert all(many.thread_cpu_ms[name]["loop"] > 0 for name in PROCESSES)
    assert many.thread_cpu_ms["draft"]["engine"] > 0
    assert all(30 < loads[0].usual_round_ms < 300 for loads in measured.hits[THIS].values())
    assert len(rounds.bars(measured)) == 4
