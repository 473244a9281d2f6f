"""Moments of the stopwatch as dates."""

from __future__ import annotations

import time

from specwire import clock


def test_a_moment_has_its_date() -> None:
    before, moment, after = time.time_ns(), clock.stopwatch_ns(), time.time_ns()
    assert before - 10**6 < clock.epoch_ns(moment) < after + 10**6
    assert clock.epoch_ns(moment - 10**9) < before - 10**9 + 10**6
