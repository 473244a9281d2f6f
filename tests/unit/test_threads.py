"""Threads of passes: no more than there are free cores, however services and others come and go."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from specwire.engine.threads import Cores, ThreadCount, group_quota, spin_briefly

SECOND = 1_000_000_000


class Machine:
    """Cores of which this process uses some, and others use some."""

    def __init__(self, num: float = 4, most: int = 4, *, is_fixed: bool = False) -> None:
        self.now_s = self.own_s = self.used_s = self.delayed_s = 0.0
        self.applied: list[int] = []
        cores = [Cores(num, lambda: self.used_s)]
        self.num_cores = num
        self.threads = ThreadCount(
            most,
            self.applied.append,
            is_fixed=is_fixed,
            cores=cores,
            own_s=lambda: self.own_s,
            delayed_s=lambda: self.delayed_s,
        )

    def work(self, seconds: float, *, others: float, takes_turns: bool = False) -> int:
        """Steps of a tenth of a second while others use so many cores, some of them at the same time; returns
        the threads at the end."""
        for _ in range(round(10 * seconds)):
            self.threads.before_step(round(self.now_s * SECOND))
            self.now_s += 0.1
            self.own_s += 0.1 * self.threads.num
            self.used_s += 0.1 * (self.threads.num + others)
            is_crowded = self.threads.num + others > self.num_cores
            self.delayed_s += 0.05 * self.threads.num * (is_crowded and not takes_turns)
        return self.threads.num


def test_threads_follow_the_cores_that_others_leave() -> None:
    machine = Machine()
    assert machine.work(5, others=0.1) == 4, "what hardly uses a core is no reason"
    assert machine.work(1, others=1.0) == 3
    assert machine.work(2, others=9.0) == 1, "one thread at least"
    assert machine.work(30, others=0.0) == 1, "the last minute counts"
    assert machine.work(31, others=0.0) == 4
    assert machine.applied == [4, 3, 1, 4]


def test_who_takes_turns_with_others_needs_no_fewer() -> None:
    machine = Machine()
    assert machine.work(30, others=2.0, takes_turns=True) == 4
    assert machine.work(2, others=2.0) == 2
    assert machine.work(70, others=1.0, takes_turns=True) == 4, "they use less since it had to wait"


def test_where_the_system_does_not_say_who_waited_use_alone_decides() -> None:
    machine = Machine()
    machine.delayed_s = math.inf
    assert machine.work(2, others=2.0, takes_turns=True) == 2


def test_threads_that_wait_for_a_core_are_counted() -> None:
    """Two that are busy on one core."""
    program = """\
import os, threading, time
from specwire.engine.threads import delayed_s
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
before_s, ends_s = delayed_s(), time.monotonic() + 0.3
def burn():
    while time.monotonic() < ends_s:
        sum(range(1000))
if not os.fork():
    burn(); os._exit(0)
burn()
assert 0.05 < delayed_s() - before_s < 1, delayed_s() - before_s
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_bursts_of_others_do_not_move_the_number_each_time() -> None:
    machine = Machine()
    for _ in range(20):
        machine.work(2, others=2.0)
        machine.work(8, others=0.0)
    assert machine.applied == [4, 2]


def test_what_happened_while_the_engine_was_idle_does_not_count() -> None:
    machine = Machine()
    machine.work(2, others=0.0)
    machine.now_s, machine.used_s = machine.now_s + 30, machine.used_s + 60
    assert machine.work(2, others=0.0) == 4


@pytest.mark.parametrize("is_fixed", [False, True])
def test_contention_is_said_once_with_the_flag(is_fixed: bool, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(num=2, most=2, is_fixed=is_fixed)
    with caplog.at_level(logging.INFO):
        assert machine.work(3, others=1.0) == (2 if is_fixed else 1), "a given number is kept"
        machine.work(70, others=0.0)
        machine.work(3, others=1.0)
    [said] = caplog.messages
    assert said.startswith("other processes use 1.0 of 2 cores: passes ")
    assert ("give --num-threads 1" in said) == is_fixed
    assert "--num-threads" in said


def test_a_quota_bounds_the_threads_from_the_start(tmp_path: Path) -> None:
    assert Machine(num=2.5, most=16).applied == [2]
    assert Machine(num=0.5, most=16).applied == [1]
    assert group_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", None), ("150000", 1.5)):
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert group_quota(tmp_path) == cores
    for limit, cores in (("max 100000", None), ("400000 100000", 4.0)):
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
        assert group_quota(tmp_path) == cores


def test_a_users_own_wait_policy_wins() -> None:
    environ: dict[str, str] = {}
    spin_briefly(environ)
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
    given = {"OMP_WAIT_POLICY": "ACTIVE"}
    spin_briefly(given)
    assert given == {"OMP_WAIT_POLICY": "ACTIVE"}


def test_services_set_the_wait_policy_before_they_load_torch() -> None:
    """libgomp reads it when it is loaded: `__main__` itself must not load it."""
    program = """\
import sys
from specwire.engine import threads
threads.spin_briefly = lambda environ: sys.exit(3 if "torch" in sys.modules else 42)
from {0} import __main__
__main__.main(["--model", "emulated:step_ms=1", "--address", "127.0.0.1:0"])
"""
    for service in ("draft_service", "verify_service"):
        assert subprocess.run([sys.executable, "-c", program.format(service)], check=False).returncode == 42
