"""Two of each service, and a killer among them: SIGKILL, SIGSTOP and hung devices at random moments.

Every request ends with the text that it would have had, or with a typed error in a run in which all replicas
of verify, or all coordinators, were down at a time; and nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from specwire import AsyncClient, Rule, SamplingParams, SpecwireError
from specwire.cli.supervisor import Service
from tests.support import report
from tests.support.effort import sized
from tests.support.fleet import Fleet, hung_device, stopped

NUM_RUNS = sized(2, 100)
NUM_CLIENTS, NUM_REQUESTS, NUM_TOKENS = 4, 3, 80
ROLES = ("verify", "draft", "coordinator")
_ALLOWED = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when, in seconds from the start of a run."""

    role: str
    index: int
    kind: str
    at_s: float
    for_s: float

    @classmethod
    def drawn(cls, draws: random.Random) -> Fault:
        role = draws.choice(ROLES)
        kinds = ("kill", "stop") if role == "coordinator" else ("kill", "stop", "hang")
        return cls(
            role, draws.randrange(2), draws.choice(kinds), draws.uniform(0, 1.5), draws.uniform(0.5, 4.0)
        )

    async def happen(self, fleet: Fleet) -> None:
        """And pass: a killed service is started again, after its time."""
        await asyncio.sleep(self.at_s)
        service = fleet.group(self.role)[self.index]
        if self.kind == "kill":
            service.kill()
            await asyncio.sleep(self.for_s)
            fleet.restart(self.role, self.index)
            return
        with contextlib.suppress(ProcessLookupError), self._held(service):
            await asyncio.sleep(self.for_s)

    @contextlib.contextmanager
    def _held(self, service: Service) -> Iterator[None]:
        with stopped(service) if self.kind == "stop" else hung_device(service, self.role):
            yield


def all_down(faults: list[Fault]) -> bool:
    """Whether both of verify, or both coordinators, may have been down at a time. A restart takes seconds."""
    victims = {(fault.role, fault.index) for fault in faults}
    return any({(role, 0), (role, 1)} <= victims for role in ("verify", "coordinator"))


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=seed, rule=Rule.GUMBEL)


async def text(client: AsyncClient, seed: int) -> tuple[int, ...]:
    done = await client.generate(params=params(seed), prompt_token_ids=[seed % 60 + 1, 2, 3])
    return done.token_ids


async def run(fleet: Fleet, draws: random.Random, expected: dict[int, tuple[int, ...]]) -> Counter[str]:
    """One run, up to the last service that serves again."""
    faults = [Fault.drawn(draws) for _ in range(draws.randint(1, 3))]
    # A victim of several is one of the first of them: it is down already.
    faults = list({(fault.role, fault.index): fault for fault in reversed(faults)}.values())
    ends: Counter[str] = Counter()

    async def requests(client: AsyncClient) -> None:
        for _ in range(NUM_REQUESTS):
            seed = draws.choice(list(expected))
            try:
                ends["identical" if await text(client, seed) == expected[seed] else "wrong"] += 1
            except SpecwireError as error:
                is_allowed = all_down(faults) and error.status in _ALLOWED
                ends[error.status if is_allowed else f"wrong: {error}"] += 1

    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(fleet.address, timeout_s=60.0))
            for _ in range(NUM_CLIENTS)
        ]
        disturbing = asyncio.gather(*(fault.happen(fleet) for fault in faults))
        await asyncio.gather(*map(requests, clients))
        await disturbing
    await fleet.complete()
    assert not any(end.startswith("wrong") for end in ends), (ends, faults)
    return ends


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_killer() -> None:
    draws, ends = random.Random(1), Counter[str]()
    fleet = Fleet(num_coordinators=2, failover_timeout_s=20)
    try:

        async def all_runs() -> None:
            async with AsyncClient(fleet.address, timeout_s=60.0) as client:
                expected = {seed: await text(client, seed) for seed in range(6)}
            for number in range(NUM_RUNS):
                ends.update(await run(fleet, draws, expected))
                deadline_s = time.monotonic() + 30
                while await asyncio.to_thread(fleet.num_held):
                    assert time.monotonic() < deadline_s, f"run {number}: still held"
                    await asyncio.sleep(0.1)

        asyncio.run(all_runs())
    finally:
        fleet.close()
    assert ends["identical"] > 0.8 * ends.total()
    outcome = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    report.note(f"{NUM_RUNS} runs with a killer, two of each service", outcome, "0 wrong, nothing held")
