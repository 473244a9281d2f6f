"""Streams cancelled after a random number of tokens: nothing of them stays anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time

import pytest

from benchmarks.processes import Devices
from coordinator.generation import Generation
from specwire import AsyncClient
from specwire.engine.jobs import Job, TokenSequence
from tests.support.cancels import Engines, Plan, cancel_wave, idle_after_s
from tests.support.harness import LocalStack, local_stack, started_services

PLAN = Plan(num_together=100, max_tokens=32, devices=Devices(target_ms=2.0, draft_ms=0.2))
TARGET = f"emulated:step_ms={PLAN.devices.target_ms}"
DRAFT = f"emulated:step_ms={PLAN.devices.draft_ms},alpha={PLAN.devices.alpha}"


async def waves(stack: LocalStack, count: int, draws: random.Random) -> list[float]:
    """Seconds until all was given back, after each wave."""
    engines = Engines(stack.verify_address, stack.draft_address)
    times_s = []
    async with AsyncClient(stack.address, timeout_s=60) as client, contextlib.aclosing(engines):
        for _ in range(count):
            await cancel_wave(client, PLAN, draws)
            times_s.append(await idle_after_s(client, engines))
        status = await client.get_status()
        assert status.num_running == status.num_waiting == 0
        assert not status.draft_unavailable
    return times_s


def forgotten_within(seconds: float) -> bool:
    """Whether no sequence is left in memory; tasks of the last ones may end a little later."""
    deadline_s = time.monotonic() + seconds
    while True:
        gc.collect()
        if not any(issubclass(type(one), TokenSequence | Job | Generation) for one in gc.get_objects()):
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_waves", "num_kv_tokens"), [(10, 16384), (3, 1024)], ids=["room for all", "room for a few"]
)
def test_cancelled_streams_leave_nothing_behind(
    num_waves: int, num_kv_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"num_kv_tokens": num_kv_tokens}
    with (
        started_services() as services,
        local_stack(TARGET, DRAFT, verify_options=options, draft_options=options) as stack,
    ):
        times_s = asyncio.run(waves(stack, num_waves, random.Random(num_waves)))
        stack.assert_idle_within(1.0)
        for service in services.values():
            service.runner.pool.check_integrity()
            assert service.runner.pool.num_held_pages == 0
        is_forgotten = forgotten_within(5.0)
    assert max(times_s) < 1.0
    assert is_forgotten
    assert [record.getMessage() for record in caplog.records if record.name.startswith("specwire")] == []


def test_closing_the_client_cancels_all_its_streams() -> None:
    """No stream is cancelled by itself here: the connection goes, as when a client dies."""

    async def leave(address: str) -> None:
        async with AsyncClient(address) as client, asyncio.TaskGroup() as readers:
            started = asyncio.Event()
            for _ in range(PLAN.num_together):
                readers.create_task(read(client, started))
            await started.wait()
            await client.close()

    async def read(client: AsyncClient, started: asyncio.Event) -> None:
        with contextlib.suppress(Exception):
            async with client.stream(prompt_token_ids=[1, 2, 3]) as stream:
                async for _ in stream:
                    started.set()

    with started_services() as services, local_stack(TARGET, DRAFT) as stack:
        asyncio.run(leave(stack.address))
        stack.assert_idle_within(1.0)
        for service in services.values():
            service.runner.pool.check_integrity()
        assert stack.client.get_status().num_running == 0
