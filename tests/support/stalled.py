"""What one reader that stalls costs the others.

Emulated devices in processes of their own; this process holds the clients. A number of readers read without
end. Beside them, in every other phase, is one more that reads a single chunk and then nothing. The number
that counts is the 99th percentile of the time between two chunks, over all readers: phases are short and
their order alternates, so that whatever else the machine does meets both kinds alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Summary, ratios, summarise
from specwire import AsyncClient, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig

PROMPT = [1, 2, 3]
_ENDLESS = 1 << 18
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        readers: how many streams are measured.
        pairs: of phases, one of each kind.
        phase_s: seconds that are measured in a phase.
        settle_s: seconds before them; the stalled reader's credit should be used up in less.
        target, draft: emulated devices.
    """

    readers: int = 99
    pairs: int = 10
    phase_s: float = 3.0
    settle_s: float = 3.0
    target: str = "emulated:step_ms=100"
    draft: str = "emulated:step_ms=4,alpha=0.8"


@dataclass(kw_only=True)
class Gaps:
    """Times between chunks in milliseconds, a list a phase; over all readers."""

    alone: list[list[float]] = field(default_factory=list)
    beside_stalled: list[list[float]] = field(default_factory=list)

    @property
    def ratio(self) -> Summary:
        """How much longer the 99th percentile is beside a stalled reader, pair by pair."""
        return summarise(ratios(list(map(p99, self.beside_stalled)), list(map(p99, self.alone))))


def p99(values: Sequence[float]) -> float:
    """The least value that 99 % of them do not exceed."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


class Readers:
    """Streams that are read without end; their gaps go to a list while one is given."""

    def __init__(self, client: AsyncClient, count: int) -> None:
        self._gaps_ms: list[float] | None = None
        self._tasks = [asyncio.create_task(self._read(client, seed)) for seed in range(count)]

    async def gaps_ms(self, settle_s: float, phase_s: float) -> list[float]:
        """Let the time `settle_s` pass, and then measure for `phase_s`.

        Raises:
            SpecwireError: a reader's stream failed.
        """
        await self._pass(settle_s)
        gaps_ms: list[float] = []
        self._gaps_ms = gaps_ms
        await self._pass(phase_s)
        self._gaps_ms = None
        return gaps_ms

    async def _pass(self, seconds: float) -> None:
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _read(self, client: AsyncClient, seed: int) -> None:
        params = SamplingParams(max_tokens=_ENDLESS, seed=seed)
        async with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
            last_s = math.nan
            async for _ in stream:
                now_s = time.perf_counter()
                if self._gaps_ms is not None:
                    self._gaps_ms.append((now_s - last_s) * 1e3)
                last_s = now_s

    async def stop(self) -> None:
        """End the streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def compare(address: str, plan: Plan) -> Gaps:
    """Measure on a running stack. Errors as for `Readers.gaps_ms`."""
    found = Gaps()
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        readers = Readers(client, plan.readers)
        await readers.gaps_ms(plan.settle_s, plan.phase_s)  # what only a first time takes
        for pair in range(plan.pairs):
            for stalled in (False, True) if pair % 2 else (True, False):
                async with _stalled(client) if stalled else contextlib.nullcontext():
                    gaps_ms = await readers.gaps_ms(plan.settle_s, plan.phase_s)
                (found.beside_stalled if stalled else found.alone).append(gaps_ms)
        await readers.stop()
    return found


@contextlib.asynccontextmanager
async def _stalled(client: AsyncClient) -> AsyncIterator[None]:
    """One more generation, of which one chunk is read."""
    params = SamplingParams(max_tokens=_ENDLESS, seed=0)
    async with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
        await anext(stream)
        yield


def measure(plan: Plan) -> Gaps:
    """Start the services, compare, and end them.

    Raises:
        ConfigError, ServiceUnavailableError: the services did not come up.
        SpecwireError: a stream failed.
    """
    config = UpConfig(
        address="127.0.0.1:0",
        target=plan.target,
        draft=plan.draft,
        num_kv_tokens=1 << 20,
        num_threads=1,
        grace_s=0.0,
    )
    with Stack(config) as stack:
        return asyncio.run(compare(stack.address, plan))
