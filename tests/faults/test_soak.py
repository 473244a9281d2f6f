"""Mixed load on real processes for a long time: memory, descriptors and threads stay as they are."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest

from benchmarks.processes import Devices
from specwire import AsyncClient, Rule, SamplingParams, SpecwireError
from specwire.cli.supervisor import Stack
from tests.support import report
from tests.support.effort import CHAOS, sized
from tests.support.idle import until_idle
from tests.support.processes import wait_until

BURST_S = sized(3.0, 30.0)
SETTLE_S = sized(1.0, 570.0)
SOAK_S = sized(10.0, 1200.0)
SAMPLE_S = sized(1.0, 10.0)
PER_S = 4.0
NUM_TOGETHER = 16
MAX_SLOPE_MIB = 1.0  # in ten minutes
MAX_SHORT_GROWTH_MIB = 48.0  # of a run that is too short for a slope
MAX_MORE_THREADS = sized(16, 4)  # grpc's own pool follows the load
ENDS = ("finish", "cancel", "finish", "disconnect", "finish", "deadline")
MAX_TOKENS = 48
pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(sized(300, 2400))]


@dataclass
class Load:
    """Mixed requests as they come in over a day, drawn from a seed: short and long, and clients that leave.

    Attributes:
        counts: of requests by how they were meant to end.
        odd: what ended otherwise.
    """

    address: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draws = random.Random(self.seed)

    @property
    def num_cancels(self) -> int:
        """Requests that were not read to their end."""
        return self.counts.total() - self.counts["finish"]

    async def burst(self, client: AsyncClient, duration_s: float, num_together: int) -> None:
        """As fast as so many readers can."""
        end_s = time.monotonic() + duration_s

        async def reader() -> None:
            while time.monotonic() < end_s:
                await self.request(client)

        async with asyncio.TaskGroup() as readers:
            for _ in range(num_together):
                readers.create_task(reader())

    async def steady(self, client: AsyncClient, duration_s: float, per_s: float) -> None:
        """Arrivals at random, so many a second on average."""
        end_s = time.monotonic() + duration_s
        async with asyncio.TaskGroup() as requests:
            while time.monotonic() < end_s:
                requests.create_task(self.request(client))
                await asyncio.sleep(self._draws.expovariate(per_s))

    async def request(self, client: AsyncClient) -> None:
        """One, ended in one of four ways, which take turns."""
        draws = self._draws
        end = ENDS[self.counts.total() % len(ENDS)]
        self.counts[end] += 1
        params = SamplingParams(
            max_tokens=MAX_TOKENS if end != "finish" else draws.randint(1, MAX_TOKENS),
            temperature=draws.choice((0.0, 0.7, 1.0)),
            rule=draws.choice(list(Rule)),
            top_p=draws.choice((0.9, 1.0)),
            seed=draws.getrandbits(60),
        )
        prompt = [draws.randrange(32) for _ in range(draws.choice((1, 8, 100)))]
        after = draws.randrange(MAX_TOKENS // 2)
        if end == "disconnect":
            async with AsyncClient(self.address) as leaving:
                await self._read(leaving, params, prompt, after, 60.0, end)
        else:
            timeout_s = draws.uniform(0.002, 0.05) if end == "deadline" else 60.0
            await self._read(client, params, prompt, after if end == "cancel" else 1000, timeout_s, end)

    async def _read(
        self,
        client: AsyncClient,
        params: SamplingParams,
        prompt: list[int],
        after: int,
        timeout_s: float,
        end: str,
    ) -> None:
        """Up to `after` tokens; to leave a client's context closes its connection under the stream."""
        context = client.stream(params=params, prompt_token_ids=prompt, timeout_s=timeout_s)
        stream = await context.__aenter__()
        try:
            async for _ in stream:
                if len(stream.tokens) >= after:
                    break
            if end == "disconnect":
                await client.close()
        except SpecwireError as error:
            if (end, error.status) != ("deadline", "DEADLINE_EXCEEDED"):
                self.odd.append(f"{end}: {error}")
        finally:
            await context.__aexit__(None, None, None)


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

    def has_descriptors_of(self, before: dict[str, Sample]) -> bool:
        """No more: connections of clients that left are closed some moments later."""
        return all(sample.num_fds <= before[name].num_fds for name, sample in self.now().items())

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
    async with AsyncClient(stack.address) as client:
        await load.burst(client, BURST_S, NUM_TOGETHER)
        await load.steady(client, SETTLE_S, PER_S)
        await until_idle(client, stack)
        before = watch.now()
        load.counts.clear()
        await watch.during(load.steady(client, SOAK_S, PER_S))
        await until_idle(client, stack)  # raises when something is still held
        await asyncio.to_thread(wait_until, lambda: watch.has_descriptors_of(before), 30)
        status = await client.get_status()
        assert status.num_running == status.num_waiting == 0
        return before, watch.now()


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
