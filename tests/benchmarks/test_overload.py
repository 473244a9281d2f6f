"""Ten times more requests than can be served: those admitted finish, the others hear of it at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks import overload
from benchmarks.overload import Plan, judge, measure, steady_rate
from benchmarks.processes import Devices
from tools.bench.metrics import OK, RequestRecord


@pytest.mark.slow
def test_five_seconds_of_ten_times_the_capacity() -> None:
    """Looser than the benchmark's bars, since tests run on machines that are busy with other things."""
    plan = Plan(
        seconds=5.0,
        num_tokens=16,
        max_running=8,
        max_waiting=16,
        num_waves=8,
        devices=Devices(target_ms=40.0, draft_ms=2.0),
    )
    with plan.start() as stack:
        found = asyncio.run(measure(stack.address, plan))
    assert found.failures == []
    assert found.num_finished == found.num_admitted > plan.max_running
    assert len(found.refusal_ms) > 5 * found.num_admitted
    assert np.median(found.refusal_ms) < 5 * overload.MAX_REFUSAL_MS
    assert found.goodput >= 0.5 * found.capacity


def record(start_s: float, end_s: float, status: str = OK, num_tokens: int = 10) -> RequestRecord:
    return RequestRecord(
        start_s=start_s,
        end_s=end_s,
        scheduled_s=start_s - 0.001,
        chunk_times_s=(end_s,) if status == OK else (),
        chunk_tokens=(num_tokens,) if status == OK else (),
        status=status,
        error="" if status == OK else "no",
    )


def test_the_capacity_is_that_of_full_places() -> None:
    """Two places, a second for each request: 20 tokens a second, whatever the first and last ones do."""
    records = [record(start, start + 1.0) for start in range(6) for _ in range(2)]
    assert steady_rate(records, concurrency=2) == pytest.approx(20.0)


def test_a_closed_loop_that_loses_requests_has_no_capacity() -> None:
    with pytest.raises(RuntimeError, match="lost 1 requests: no"):
        steady_rate([record(0, 1), record(0, 1, "INTERNAL")], concurrency=2)


def test_refusals_failures_and_late_ends_are_told_apart() -> None:
    records = [
        record(0.0, 1.0),
        record(1.0, 6.0),  # finished, after the load was over
        record(0.5, 0.52, overload.REFUSED),
        record(0.6, 0.61, overload.REFUSED),
        record(0.0, 3.0, "DEADLINE_EXCEEDED"),
    ]
    found = judge(records, capacity=4.0, offered=10.0, seconds=5.0)
    assert (found.num_admitted, found.num_finished) == (3, 2)
    assert found.failures == ["DEADLINE_EXCEEDED: no"]
    assert found.refusal_ms == pytest.approx([10, 20])
    assert found.lateness_ms == pytest.approx([1.0] * 5)
    assert found.goodput == pytest.approx(2.0)
    assert [bar.passed for bar in overload.bars(found)] == [False, True, True, False]
