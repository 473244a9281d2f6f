"""Streams cancelled at random moments, and how long until nothing of them is held anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field

import grpc

from benchmarks.processes import Devices
from specwire import AsyncClient, Rule, SamplingParams
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
_PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A wave of cancelled streams.

    Attributes:
        num_together: streams of a wave, which all end before the next one starts.
        max_tokens: of a stream that would not be cancelled.
    """

    num_together: int = 100
    max_tokens: int = 48
    devices: Devices = field(default_factory=lambda: Devices(target_ms=4.0, draft_ms=0.5))


async def cancel_one(client: AsyncClient, params: SamplingParams, after: int, delay_s: float) -> None:
    """Cancel a stream when it has brought `after` tokens, or `delay_s` after it was sent if that is 0."""
    async with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
        if after == 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(anext(stream), delay_s)
            return
        async for _ in stream:
            if len(stream.tokens) >= after:
                return


async def cancel_wave(client: AsyncClient, plan: Plan, draws: random.Random) -> None:
    """One wave of streams, each cancelled at a moment of its own."""
    async with asyncio.TaskGroup() as wave:
        for _ in range(plan.num_together):
            params = SamplingParams(
                rule=draws.choice(list(Rule)), seed=draws.getrandbits(60), max_tokens=plan.max_tokens
            )
            after, delay_s = draws.randrange(plan.max_tokens), draws.random() * 0.05
            wave.create_task(cancel_one(client, params, after, delay_s))


class Engines:
    """The engines' own counts, asked over the wire."""

    def __init__(self, verify_address: str, draft_address: str) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for address in (verify_address, draft_address)]
        self._verify = verify_pb2_grpc.VerifyServiceStub(self._channels[0])
        self._draft = draft_pb2_grpc.DraftServiceStub(self._channels[1])

    async def statuses(self) -> list[common_pb2.EngineStatus]:
        """Of verify and draft."""
        verify = await self._verify.GetModelInfo(verify_pb2.VerifyServiceGetModelInfoRequest(), timeout=5)
        draft = await self._draft.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=5)
        return [verify.status, draft.status]

    async def aclose(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()


async def idle_after_s(client: AsyncClient, engines: Engines) -> float:
    """Seconds until no generation runs or waits, and no sequence and no page is held.

    Raises:
        RuntimeError: that takes longer than anybody would wait.
    """
    started_s = time.perf_counter()
    while True:
        statuses, status = await engines.statuses(), await client.get_status()
        held = sum(one.num_sequences + one.num_held_pages + one.num_requests for one in statuses)
        elapsed_s = time.perf_counter() - started_s
        if not held + status.num_running + status.num_waiting + status.num_paused:
            return elapsed_s
        if elapsed_s > _PATIENCE_S:
            raise RuntimeError(f"still held after {elapsed_s:.0f} s: {statuses}, {status}")
