"""A device that hangs while its process lives: one bounded wait, another replica, no return before it works.

The compute thread blocks in the middle of a pass; gRPC, health and handshake of the service go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import coordinator.service
import verify_service.service
from specwire import AsyncClient, Rule, SamplingParams
from specwire.config.services import CoordinatorConfig, VerifyConfig
from specwire.engine import boot
from specwire.engine.batch import Feed
from specwire.engine.device import Decide
from specwire.engine.progress import LEAST_LIMIT_S, LOOK_EVERY_S, Heartbeat
from tests.support.harness import LocalStack, LoopThread, local_stack, started_services

PASS_MS = 10.0
TARGET, DRAFT = f"emulated:step_ms={PASS_MS:g}", "emulated:step_ms=1,alpha=0.8"
PROMPT = [3, 1, 4]
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.ServingStatus.Value(n) for n in ("SERVING", "NOT_SERVING")
)


class Brake:
    """Lets the passes of a runner block."""

    def __init__(self, service: boot.ModelService) -> None:
        self._may_run = threading.Event()
        self._may_run.set()
        self.is_held = threading.Event()
        run, runner = service.runner.run, service.runner

        def held(feeds: Sequence[Feed], question: Any, decide: Decide) -> Any:
            if not self._may_run.is_set():
                self.is_held.set()
            self._may_run.wait()
            return run(feeds, question, decide)

        runner.run = held  # type: ignore[method-assign]

    def hold(self) -> None:
        """From the next pass on."""
        self.is_held.clear()
        self._may_run.clear()

    def release(self) -> None:
        self._may_run.set()


@contextlib.contextmanager
def braked(role: str, **options: Any) -> Iterator[tuple[LocalStack, Brake]]:
    """A stack, and the brake of one of its services, released at the end."""
    with started_services() as services, local_stack(TARGET, DRAFT, coordinator_options=options) as stack:
        brake = Brake(services[role])
        try:
            yield stack, brake
        finally:
            brake.release()


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)


def wait_until_health(address: str, wanted: int, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while health(address) != wanted:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_silence_counts_while_the_loop_looks_and_there_is_work() -> None:
    progress = Heartbeat()
    progress.look(has_work=True)
    progress.beat(usual_s=0.01)
    num_looks = round(LEAST_LIMIT_S / LOOK_EVERY_S)
    for _ in range(num_looks + 1):
        progress.look(has_work=True)
    assert not progress.hangs
    progress.look(has_work=True, elapsed_s=60.0)  # the process was stopped meanwhile
    assert progress.hangs
    assert progress.silent_s < LEAST_LIMIT_S + 2 * LOOK_EVERY_S
    progress.beat(usual_s=1.0)
    progress.look(has_work=True)
    assert not progress.hangs
    for _ in range(60):
        progress.look(has_work=True)
    progress.look(has_work=False)
    assert not progress.silent_s
    for _ in range(81):
        progress.look(has_work=True)
    assert progress.hangs, "over 20 times the usual"
    progress.look(has_work=False)
    assert progress.hangs, "as long as nothing has moved"


@pytest.mark.serial
@pytest.mark.parametrize("num_draft_tokens", [pytest.param("4", marks=pytest.mark.slow), "auto"])
def test_a_draft_that_hangs_costs_one_wait(num_draft_tokens: str) -> None:
    """One gap, then plain decoding at its full speed; back when it has answered a request."""
    options = {"num_draft_tokens": num_draft_tokens, "draft_timeout_ms": 1000.0}
    with braked("draft", **options) as (stack, brake):

        async def gaps(client: AsyncClient, num_tokens: int, hold_at: int | None = None) -> list[float]:
            params = SamplingParams(max_tokens=num_tokens, seed=1, rule=Rule.GUMBEL)
            times = [time.monotonic()]
            async with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
                async for chunk in stream:
                    times.append(time.monotonic())
                    if hold_at is not None and chunk.first_index >= hold_at:
                        brake.hold()
            return [later - before for before, later in pairwise(times)]

        async def speculates(client: AsyncClient) -> bool:
            params = SamplingParams(max_tokens=40, seed=2, rule=Rule.GUMBEL, num_draft_tokens=4)
            done = await client.generate(params=params, prompt_token_ids=PROMPT)
            return done.speculation.num_accepted_tokens > 0

        async def scenario() -> None:
            async with AsyncClient(stack.address) as client:
                await gaps(client, 60)
                hung = await gaps(client, 400, hold_at=100)
                assert max(hung) < 1.5
                assert sorted(hung)[-2] < 0.5, "the others did not wait"
                wait_until_health(stack.draft_address, NOT_SERVING)
                replica = (await client.get_status()).draft_replicas[0]
                while "hangs" not in replica.unavailable:
                    await asyncio.sleep(0.05)
                    replica = (await client.get_status()).draft_replicas[0]
                meanwhile = await gaps(client, 100)
                assert max(meanwhile[1:]) < 0.5
                brake.release()
                wait_until_health(stack.draft_address, SERVING)
                async with asyncio.timeout(30):
                    while not await speculates(client):
                        pass

        asyncio.run(scenario())


@pytest.mark.serial
def test_a_verify_service_that_hangs_is_left_for_another() -> None:
    """Of two replicas: every request ends, with the text that it would have had, after a pause of seconds."""
    with contextlib.ExitStack() as stack:
        thread = LoopThread()
        stack.callback(thread.close)
        brakes, addresses = [], []
        for _ in range(2):
            with started_services() as services:
                address = stack.enter_context(
                    thread.entered(
                        lambda: verify_service.service.serving(VerifyConfig(model=TARGET, grace_s=0.0))
                    )
                )
            brakes.append(Brake(services["verify"]))
            addresses.append(address)
            stack.callback(brakes[-1].release)
        config = CoordinatorConfig(verify_address=",".join(addresses), grace_s=0.0)
        address = stack.enter_context(thread.entered(lambda: coordinator.service.serving(config)))

        async def scenario() -> None:
            async with AsyncClient(address) as client:
                params = [SamplingParams(max_tokens=60, seed=i, rule=Rule.GUMBEL) for i in range(6)]
                alone = [await client.generate(params=p, prompt_token_ids=PROMPT) for p in params]
                longest = 0.0

                async def one(p: SamplingParams) -> tuple[int, ...]:
                    nonlocal longest
                    last_s = time.monotonic()
                    async with client.stream(params=p, prompt_token_ids=PROMPT) as stream:
                        async for chunk in stream:
                            longest = max(longest, time.monotonic() - last_s)
                            last_s = time.monotonic()
                            if chunk.first_index > 10:
                                brakes[0].hold()
                    return stream.completion.token_ids

                texts = await asyncio.gather(*(one(p) for p in params))
                assert texts == [done.token_ids for done in alone]
                assert longest < 3.0 + PASS_MS / 1e3
                found = {replica.address: replica for replica in (await client.get_status()).verify_replicas}
                assert "hangs" in found[addresses[0]].unavailable
                assert not found[addresses[1]].unavailable
                assert health(addresses[0]) == NOT_SERVING

        asyncio.run(scenario())
        brakes[0].release()
        wait_until_health(addresses[0], SERVING)
