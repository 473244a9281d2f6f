"""The load: sends requests to a server on a schedule, and records the responses.

An *open* loop sends on a schedule, whether the server keeps up or not, as independent users do; a *closed*
loop keeps a number of requests running, as a batch job does. A slow server slows a closed loop down, which
hides its queueing: latencies under a given load come from the open one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specwire.core import SamplingParams
from specwire.errors import ResourceExhaustedError, SpecwireError
from tools.bench.backends import Backend
from tools.bench.metrics import RequestRecord
from tools.bench.prompts import Prompt

_MAX_SEED = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedLoad:
    """How requests are sent; `rate` makes it an open loop, `concurrency` alone a closed one.

    Attributes:
        num_requests: in total; prompts are used in turn.
        rate: requests per second; infinity sends all at once.
        concurrency: requests that run at a time; in an open loop, those that are due wait for their turn.
        burstiness: shape of the gamma distribution of the times between requests: 1 is a Poisson process,
            less is bursty, more is more regular, infinity is constant.
        retries: how often a refused request is sent again, when the server says.
        seed: of the times; request i samples with seed + i.
    """

    num_requests: int
    rate: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    retries: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.rate is not None or self.concurrency is not None, "an open loop or a closed one"


def arrival_times(load: OfferedLoad) -> npt.NDArray[np.float64]:
    """When an open loop sends, in seconds since its start, [num_requests].

    As in `vllm bench serve`, the times between requests follow a gamma distribution and are then scaled so
    that the last request is sent at num_requests / rate exactly: every seed offers the requested rate. (For a
    Poisson process that conditions on the number of arrivals, which leaves them independent.)
    """
    assert load.rate is not None
    n, rate = load.num_requests, load.rate
    if math.isinf(rate):
        return np.zeros(n)
    if math.isinf(load.burstiness):
        return np.arange(1, n + 1) / rate
    times: npt.NDArray[np.float64] = np.cumsum(
        np.random.default_rng(load.seed).gamma(load.burstiness, size=n)
    )
    scale = n / rate / float(times[-1])
    return times * scale


@dataclass
class Measurement:
    """Sends the load; `records` and `duration_s` are valid also after cancellation.

    Attributes:
        prompts: at least one.
        params: of every request, except for the seed and a prompt's own `max_tokens`.
        on_record: called for each request that ended.
    """

    backend: Backend
    prompts: Sequence[Prompt]
    params: SamplingParams
    load: OfferedLoad
    on_record: Callable[[RequestRecord], None] = lambda _: None
    records: list[RequestRecord] = field(init=False, default_factory=list)
    duration_s: float = field(init=False, default=0.0)
    _start_s: float = field(init=False, default=0.0)

    async def warm_up(self, num_requests: int) -> None:
        """Send a few requests one by one without records; errors are ignored."""
        for index in range(num_requests):
            await self._attempt(index)

    async def run(self) -> None:
        """Send everything and wait for all answers."""
        self._start_s = time.perf_counter()
        try:
            await (self._closed_loop() if self.load.rate is None else self._open_loop())
        finally:
            self.duration_s = self._now_s()

    async def _open_loop(self) -> None:
        turns = asyncio.Semaphore(self.load.concurrency or self.load.num_requests)

        async def user(index: int, at_s: float) -> None:
            async with turns:
                await self._request(index, at_s)

        async with asyncio.TaskGroup() as requests:
            for index, at_s in enumerate(arrival_times(self.load)):
                await asyncio.sleep(at_s - self._now_s())
                requests.create_task(user(index, float(at_s)))

    async def _closed_loop(self) -> None:
        indices = iter(range(self.load.num_requests))

        async def user() -> None:
            for index in indices:  # shared by all users
                await self._request(index)

        async with asyncio.TaskGroup() as users:
            for _ in range(self.load.concurrency or 0):
                users.create_task(user())

    async def _request(self, index: int, scheduled_s: float | None = None) -> None:
        """One request, with retries after refusals, to its record."""
        start_s, num_refusals = self._now_s(), 0
        while True:
            record, error = await self._attempt(index)
            if not isinstance(error, ResourceExhaustedError):
                break
            num_refusals += 1
            if error.retry_after_ms is None or num_refusals > self.load.retries:
                break
            await asyncio.sleep(error.retry_after_ms / 1e3)
        record.start_s, record.end_s, record.scheduled_s = start_s, self._now_s(), scheduled_s
        record.num_refusals = num_refusals
        self.records.append(record)
        self.on_record(record)

    async def _attempt(self, index: int) -> tuple[RequestRecord, SpecwireError | None]:
        """What came of sending a request once, and why it failed if it did."""
        record, prompt = RequestRecord(), self.prompts[index % len(self.prompts)]
        seed = (self.load.seed + index) % _MAX_SEED
        max_tokens = prompt.max_tokens or self.params.max_tokens
        try:
            params = dataclasses.replace(self.params, seed=seed, max_tokens=max_tokens)
            await self.backend.send(prompt, params, record, self._now_s)
        except SpecwireError as error:
            record.status, record.error = error.status, str(error)
            return record, error
        return record, None

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s
