"""Mixed load on real processes for a long time: memory, descriptors and threads stay as they are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from benchmarks.processes import Devices
from specwire import AsyncClient
from specwire.cli.supervisor import Stack
from tests.support import report
from tests.support.effort import CHAOS, sized
from tests.support.idle import Engines, idle_after_s
from tests.support.load import Load

BURST_S = sized(3.0, 30.0)
SETTLE_S = sized(1.0, 570.0)
SOAK_S = sized(10.0, 1200.0)
SAMPLE_S = sized(1.0, 10.0)
PER_S = 4.0
NUM_TOGETHER = 16
MAX_SLOPE_MIB = 1.0  # in ten minutes
MAX_SHORT_GROWTH_MIB = 48.0  # of a run that is too short for a slope
MAX_MORE_THREADS = sized(16, 4)  # grpc's own pool follows the load
pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(sized(300, 2400))]


@dataclass(frozen=True)
class Sample:
    """What a process held at a moment."""

    time_s: float
    rss_mib: float
    num_fds: int
    num_threads: int


class Watch:
    """The service processes of a stack."""

    def __init__(self, stack: Stack) -> None:
        self._processes = {s.module: psutil.Process(s.process.pid) for s in stack.services}
        self.samples: dict[str, list[Sample]] = {name: [] for name in self._processes}

    def now(self) -> dict[str, Sample]:
        """What they hold."""
        return {name: self._sample(process) for name, process in self._processes.items()}

    @staticmethod
    def _sample(process: psutil.Process) -> Sample:
        rss_mib = process.memory_info().rss / 2**20
        return Sample(time.monotonic(), rss_mib, process.num_fds(), process.num_threads())

    async def during(self, load: Awaitable[None]) -> None:
        """Take samples until the load is over."""
        running = asyncio.ensure_future(load)
        while not running.done():
            for name, sample in self.now().items():
                self.samples[name].append(sample)
            await asyncio.wait([running], timeout=SAMPLE_S)
        await running


def slope_mib(samples: Sequence[Sample]) -> float:
    """Resident memory in MiB per ten minutes: a straight line through the samples."""
    times = np.array([sample.time_s for sample in samples]) / 600
    return float(np.polyfit(times, [sample.rss_mib for sample in samples], 1)[0])


async def soak(stack: Stack, load: Load, watch: Watch) -> tuple[dict[str, Sample], dict[str, Sample]]:
    """What the idle processes hold before and after; the watch has what they held meanwhile."""
    assert stack.draft is not None
    engines = Engines(stack.verify.address, stack.draft.address)
    async with AsyncClient(stack.address) as client, contextlib.aclosing(engines):
        await load.burst(client, BURST_S, NUM_TOGETHER)
        await load.steady(client, SETTLE_S, PER_S)
        await idle_after_s(client, engines)
        before = watch.now()
        load.counts.clear()
        await watch.during(load.steady(client, SOAK_S, PER_S))
        await idle_after_s(client, engines)  # raises when something is still held
        await descriptors_return(watch, before)
        status = await client.get_status()
        assert status.num_running == status.num_waiting == 0
        return before, watch.now()


async def descriptors_return(watch: Watch, before: dict[str, Sample]) -> None:
    """Connections of clients that left are closed some moments later."""
    deadline_s = time.monotonic() + 30
    while any(sample.num_fds > before[name].num_fds for name, sample in watch.now().items()):
        assert time.monotonic() < deadline_s, (before, watch.now())
        await asyncio.sleep(0.1)


@pytest.mark.slow
def test_soak() -> None:
    devices = Devices(target_ms=4.0, draft_ms=0.5)
    with devices.stack(num_kv_tokens=16384) as stack:
        load, watch = Load(stack.address, seed=1), Watch(stack)
        before, after = asyncio.run(soak(stack, load, watch))
    assert load.odd == []
    assert all(load.counts[end] for end in ("finish", "cancel", "disconnect", "deadline"))
    for name, samples in watch.samples.items():
        assert after[name].num_threads <= before[name].num_threads + MAX_MORE_THREADS
        growth_mib = after[name].rss_mib - before[name].rss_mib
        slope = slope_mib(samples) if CHAOS else 0.0
        report.note(
            f"soak, {SOAK_S / 60:.0f} of {(BURST_S + SETTLE_S + SOAK_S) / 60:.0f} minutes counted, {name}",
            f"{load.counts.total()} requests, {load.num_cancels / SOAK_S:.1f} a second not read to the end",
            f"{slope:+.2f} MiB in 10 minutes; {before[name].rss_mib:.1f} to {after[name].rss_mib:.1f} MiB, "
            f"{before[name].num_fds} to {after[name].num_fds} descriptors, "
            f"{before[name].num_threads} to {after[name].num_threads} threads",
        )
        if CHAOS:
            assert slope <= MAX_SLOPE_MIB, name
        else:
            assert growth_mib <= MAX_SHORT_GROWTH_MIB, name
