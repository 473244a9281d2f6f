"""The device of the only draft hangs while its process lives: one bounded wait, no return before it works.

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

import pytest

from specwire import AsyncClient, Rule, SamplingParams
from specwire.engine import boot
from specwire.engine.batch import Feed
from specwire.engine.device import Decide
from specwire.engine.progress import LEAST_LIMIT_S, LOOK_EVERY_S, Watchdog
from specwire.engine.replies import Replies
from tests.support.harness import LocalStack, is_serving, local_stack, started_services
from tests.support.processes import wait_until

PASS_MS = 10.0
TARGET, DRAFT = f"emulated:step_ms={PASS_MS:g}", "emulated:step_ms=1,alpha=0.8"
PROMPT = [3, 1, 4]


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


def test_silence_counts_while_the_loop_looks_and_there_is_work() -> None:
    progress = Watchdog(Replies())
    progress.look(has_work=True)
    progress.beat(usual_s=0.01)
    num_looks = round(LEAST_LIMIT_S / LOOK_EVERY_S)
    for _ in range(num_looks + 1):
        progress.look(has_work=True)
    assert not progress.hangs
    progress.look(has_work=True, elapsed_s=60.0)  # the process was stopped meanwhile
    assert progress.hangs
    assert progress.quiet_s < LEAST_LIMIT_S + 2 * LOOK_EVERY_S
    progress.beat(usual_s=1.0)
    progress.look(has_work=True)
    assert not progress.hangs
    for _ in range(60):
        progress.look(has_work=True)
    progress.look(has_work=False)
    assert not progress.quiet_s
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
                wait_until(lambda: not is_serving(stack.draft_address), 30)
                replica = (await client.get_status()).draft_replicas[0]
                while "hangs" not in replica.unavailable:
                    await asyncio.sleep(0.05)
                    replica = (await client.get_status()).draft_replicas[0]
                meanwhile = await gaps(client, 100)
                assert max(meanwhile[1:]) < 0.5
                brake.release()
                wait_until(lambda: is_serving(stack.draft_address), 30)
                async with asyncio.timeout(30):
                    while not await speculates(client):
                        pass

        asyncio.run(scenario())
