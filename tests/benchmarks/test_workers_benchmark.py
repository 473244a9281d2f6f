"""The benchmark of workers: its parts work together, and streams run at all workers."""

from __future__ import annotations

import pytest

from benchmarks.workers import COORDINATOR, COUNTS, READERS, Plan, details, measure


@pytest.mark.slow
def test_streams_run_at_all_workers() -> None:
    """As many at each, and rounds are counted where they are made."""
    plan = Plan(num_streams=8, num_connections=4, settle_s=0.0, window_s=0.2, num_repetitions=1)
    samples = measure(plan)
    for num_workers in COUNTS:
        (sample,) = samples[num_workers]
        assert sample.rounds_per_s > 0
        assert sample.cores[COORDINATOR] > 0
        assert sample.cores[READERS] >= 0
    assert len(details(samples).splitlines()) == 2 + len(COUNTS)
