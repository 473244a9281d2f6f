"""Processes that die, hang, drain and come back under load: clients see a delay, and nothing else.

The oracle is the text of the undisturbed run, by the Gumbel rule. With CHAOS=1 each of 8 clients has 100
requests instead of 5, the bounds on gaps are those of the issue, and gaps are printed; otherwise bounds leave
room for a machine that is busy with other things.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from specwire import AsyncClient, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.services import NO_DRAFT, UpConfig
from specwire.v1 import generation_pb2
from tests.support.fleet import Fleet, Load, Seen, run, stopped

IS_LONG = os.environ.get("CHAOS") == "1"
LOAD = Load(num_clients=8, num_requests=100 if IS_LONG else 5)
NUM_REQUESTS = LOAD.num_clients * LOAD.num_requests
AT_CHUNK = 40  # of all clients: when it happens, in mid-stream for each of them
PATIENCE_S = 60.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900 if IS_LONG else 300)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(draft_timeout_ms=1000, failover_timeout_s=60)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> Seen:
    seen = asyncio.run(run(fleet.address, Load(LOAD.num_clients, 5)))
    assert seen.errors == []
    assert seen.num_accepted > 0
    return seen


def check(seen: Seen, undisturbed: Seen, *, gap_s: float, num_requests: int = NUM_REQUESTS) -> None:
    """`gap_s` is what the issue asks for; a busy machine may take many times as long."""
    if IS_LONG:
        print(f"{seen.num_done} of {num_requests}, longest gap {seen.longest_gap_s:.3f} s of {gap_s} s")
    assert seen.errors == []
    assert seen.num_done == num_requests
    assert seen.texts.items() <= undisturbed.texts.items()
    assert seen.longest_gap_s < (gap_s if IS_LONG else gap_s + 20)


async def status(address: str) -> generation_pb2.GetStatusResponse:
    async with AsyncClient(address) as client:
        return await client.get_status()


async def in_mid_stream(seen: Seen) -> None:
    """Until the load is well under way."""
    await reached(seen, AT_CHUNK)


async def reached(seen: Seen, num_chunks: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while seen.num_chunks < num_chunks:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def all_available(address: str) -> None:
    """All verify replicas, after some were stopped or started again."""
    async with asyncio.timeout(PATIENCE_S):
        while any(one.unavailable for one in (await status(address)).verify_replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def missed(address: str, index: int) -> None:
    """Until it is known that a verify replica takes no streams."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await status(address)).verify_replicas[index].unavailable:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def busiest(address: str, role: str) -> int:
    """Index of the replica with the most streams."""
    now = await status(address)
    found = now.verify_replicas if role == "verify" else now.draft_replicas
    return max(range(len(found)), key=lambda i: found[i].num_streams)


@pytest.mark.slow
async def test_a_verify_replica_hangs_and_its_late_answers_are_dropped(
    fleet: Fleet, undisturbed: Seen
) -> None:
    async def disturb(seen: Seen) -> None:
        await in_mid_stream(seen)
        lost = await busiest(fleet.address, "verify")
        with stopped(fleet.verifies[lost]):
            await missed(fleet.address, lost)

    seen = await run(fleet.address, LOAD, disturb)
    check(seen, undisturbed, gap_s=4.0)
    await all_available(fleet.address)


async def test_a_verify_replica_drains_and_nothing_fails(fleet: Fleet, undisturbed: Seen) -> None:
    async def disturb(seen: Seen) -> None:
        await in_mid_stream(seen)
        left = await busiest(fleet.address, "verify")
        fleet.verifies[left].terminate()
        assert await asyncio.to_thread(fleet.verifies[left].process.wait, PATIENCE_S) == 0
        fleet.restart("verify", left)

    before = sum(one.num_lost for one in (await status(fleet.address)).verify_replicas)
    seen = await run(fleet.address, LOAD, disturb)
    check(seen, undisturbed, gap_s=1.0)
    assert sum(one.num_lost for one in (await status(fleet.address)).verify_replicas) == before


async def test_a_draft_hangs_and_the_other_one_is_taken_up(fleet: Fleet, undisturbed: Seen) -> None:
    accepted = []

    async def disturb(seen: Seen) -> None:
        await in_mid_stream(seen)
        with stopped(fleet.drafts[await busiest(fleet.address, "draft")]):
            accepted.append(seen.num_accepted)
            await reached(seen, seen.num_chunks + 3 * AT_CHUNK)
            accepted.append(seen.num_accepted)

    seen = await run(fleet.address, LOAD, disturb)
    check(seen, undisturbed, gap_s=2.0)
    assert accepted[1] > accepted[0]


async def test_a_draft_is_killed_and_the_other_one_taken_up(fleet: Fleet, undisturbed: Seen) -> None:
    accepted = []

    async def disturb(seen: Seen) -> None:
        await in_mid_stream(seen)
        fleet.drafts[await busiest(fleet.address, "draft")].kill()
        accepted.append(seen.num_accepted)

    seen = await run(fleet.address, LOAD, disturb)
    check(seen, undisturbed, gap_s=1.0)
    assert seen.num_accepted > accepted[0]
    now = await status(fleet.address)
    assert any(one.num_lost and one.unavailable for one in now.draft_replicas)
    assert all(one.num_streams == 0 for one in [*now.verify_replicas, *now.draft_replicas])


async def test_one_of_two_verify_replicas_is_killed_and_then_the_other(
    fleet: Fleet, undisturbed: Seen
) -> None:
    await fleet.complete()
    await all_available(fleet.address)
    lost = []

    async def disturb(seen: Seen) -> None:
        await in_mid_stream(seen)
        lost.append(await busiest(fleet.address, "verify"))
        fleet.verifies[lost[0]].kill()

    seen = await run(fleet.address, LOAD, disturb)
    check(seen, undisturbed, gap_s=3.0)

    async def restart(seen: Seen) -> None:
        await in_mid_stream(seen)
        fleet.restart("verify", 1 - lost[0])

    seen = await run(fleet.address, LOAD, restart)
    check(seen, undisturbed, gap_s=60.0)


def test_up_starts_replicas_and_goes_on_while_one_is_left() -> None:
    config = UpConfig(target="emulated:step_ms=5", draft=NO_DRAFT, replicas=2, address="127.0.0.1:0")
    params = SamplingParams(max_tokens=20, seed=1)
    with Stack(config) as stack:
        assert len(stack.verifies) == 2
        asyncio.run(served(stack, params, num_available=2))
        stack.verifies[0].kill()
        ended = stack.wait()
        assert ended is stack.verifies[0]
        assert not stack.is_required(ended)
        asyncio.run(served(stack, params, num_available=1))
        stack.verifies[1].kill()
        assert stack.is_required(stack.wait())


async def served(stack: Stack, params: SamplingParams, num_available: int) -> None:
    async with AsyncClient(stack.address) as client:
        done = await client.generate(params=params, prompt_token_ids=[1, 2, 3])
        assert done.usage.completion_tokens == params.max_tokens
        replicas = (await client.get_status()).verify_replicas
        assert {one.address for one in replicas} == {one.address for one in stack.verifies}
        assert sum(not one.unavailable for one in replicas) == num_available
