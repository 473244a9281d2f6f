"""Moments of the stopwatch as dates."""

from __future__ import annotations

import time

import pytest

from specwire import clock


def test_a_moment_has_its_date() -> None:
    minute_ns = 60 * 10**9  # however long this process has to wait for a processor
    date_ns, moment = time.time_ns(), clock.stopwatch_ns()
    assert clock.epoch_ns(moment) == pytest.approx(date_ns, rel=0, abs=minute_ns)
    assert clock.epoch_ns(moment - 60 * minute_ns) == pytest.approx(
        date_ns - 60 * minute_ns, rel=0, abs=minute_ns
    )
