"""`python -m benchmarks.cancels`: 20,000 streams cancelled after a random number of tokens.

Memory of the three service processes is read whenever a milestone is reached and everything has been given
back. The first few thousand fill allocators and caches; after that it must not grow.

grpc.aio 1.85 itself loses about 100 bytes for each operation that a cancelled call has under way
(https://github.com/grpc/grpc/issues/43360): about 0.3 KiB a cancelled stream in the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import numpy as np

from benchmarks.bars import Bar, Report, machine
from benchmarks.processes import Devices, Usage
from specwire import AsyncClient, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
MAX_IDLE_S = 1.0
MAX_GROWTH_MIB = 1.0
_PATIENCE_S = 30.0
_ROLES = ("coordinator", "draft_service", "verify_service")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many, and when memory is read.

    Attributes:
        milestones: numbers of cancels; growth is counted from the one nearest to a quarter of the last.
        num_together: streams of a wave, which all end before the next one starts.
        max_tokens: of a stream that would not be cancelled.
    """

    milestones: Sequence[int] = (2_000, 5_000, 10_000, 15_000, 20_000)
    num_together: int = 100
    max_tokens: int = 48
    seed: int = 0
    devices: Devices = field(default_factory=lambda: Devices(target_ms=4.0, draft_ms=0.5))

    def start(self) -> Stack:
        """Services with room for a wave."""
        return self.devices.stack(num_kv_tokens=self.num_together * 2 * self.max_tokens)

    @property
    def first_counted(self) -> int:
        """The milestone that growth is counted from."""
        return min(self.milestones, key=lambda count: abs(count - self.milestones[-1] / 4))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was found at a milestone.

    Attributes:
        idle_s: from the last cancel until nothing was held anywhere, in seconds.
        rss_mib: by process.
    """

    num_cancels: int
    idle_s: float
    rss_mib: dict[str, float]


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


async def measure(stack: Stack, plan: Plan) -> list[Reading]:
    """Waves until the last milestone."""
    draws, usage, readings = random.Random(plan.seed), Usage.of(stack), []
    assert stack.draft is not None
    engines = Engines(stack.verify.address, stack.draft.address)
    async with AsyncClient(stack.address) as client, contextlib.aclosing(engines):
        num_cancels = 0
        for milestone in plan.milestones:
            while num_cancels < milestone:
                await cancel_wave(client, plan, draws)
                num_cancels += plan.num_together
            idle_s = await idle_after_s(client, engines)
            readings.append(Reading(num_cancels=num_cancels, idle_s=idle_s, rss_mib=usage.rss_mib()))
            print(readings[-1], file=sys.stderr, flush=True)
    return readings


def growth_mib(readings: Sequence[Reading], role: str, first_counted: int) -> float:
    """From the first counted milestone to the last one, in MiB."""
    [first] = [reading for reading in readings if reading.num_cancels == first_counted]
    return readings[-1].rss_mib[role] - first.rss_mib[role]


def slope_kib(readings: Sequence[Reading], role: str, first_counted: int) -> float:
    """KiB for each thousand cancels: a straight line through what was read since the first counted one."""
    counted = [reading for reading in readings if reading.num_cancels >= first_counted]
    counts = [reading.num_cancels / 1e3 for reading in counted]
    return float(np.polyfit(counts, [reading.rss_mib[role] * 1024 for reading in counted], 1)[0])


def bars(readings: Sequence[Reading], first_counted: int) -> list[Bar]:
    """The promises about cancels."""
    growths = [
        Bar(
            what=f"{role}: memory from {first_counted:,} to {readings[-1].num_cancels:,} cancels",
            measured=growth_mib(readings, role, first_counted),
            limit=MAX_GROWTH_MIB,
            unit="MiB",
        )
        for role in _ROLES
    ]
    idle_s = max(reading.idle_s for reading in readings)
    return [Bar(what="everything given back, slowest", measured=idle_s, limit=MAX_IDLE_S, unit="s"), *growths]


def details(readings: Sequence[Reading], first_counted: int) -> str:
    """Memory at every milestone."""
    lines = [
        f"| cancels | {' | '.join(f'{role} (MiB)' for role in _ROLES)} | given back after (s) |",
        "|---|---|---|---|---|",
    ]
    for reading in readings:
        cells = [f"{reading.num_cancels:,}", *(f"{reading.rss_mib[role]:.1f}" for role in _ROLES)]
        lines.append(f"| {' | '.join(cells)} | {reading.idle_s:.2f} |")
    slopes = [f"{role} {slope_kib(readings, role, first_counted):.0f}" for role in _ROLES]
    fit = f"Slope of a straight line from {first_counted:,} cancels, KiB for each thousand: "
    return "\n".join([*lines, "", f"{fit}{', '.join(slopes)}."])


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write the files; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.cancels", description=__doc__)
    parser.add_argument(
        "--cancels", type=int, default=Plan.milestones[-1], help="in all (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    args = parser.parse_args(argv)
    scale = args.cancels / Plan.milestones[-1]
    facts, plan = machine(), Plan(milestones=[round(scale * count) for count in Plan.milestones])
    with plan.start() as stack:
        readings = asyncio.run(measure(stack, plan))
    found = Report(
        name="cancels",
        title=f"{readings[-1].num_cancels:,} cancelled streams",
        machine=facts,
        about=_about(plan),
        bars=bars(readings, plan.first_counted),
        details=details(readings, plan.first_counted),
        data={"plan": asdict(plan), "readings": [asdict(reading) for reading in readings]},
    )
    print(found.write(args.out))
    return int(not all(bar.passed for bar in found.bars))


def _about(plan: Plan) -> str:
    return (
        f"Waves of {plan.num_together} streams through three service processes on emulated devices, both "
        f"rules, each stream cancelled after a random number of its {plan.max_tokens} tokens; with 0 "
        f"at a random moment before the first one. Resident memory is read when nothing is held any more. "
        f"The criterion: at most {MAX_GROWTH_MIB:g} MiB of growth in each process from cancel "
        f"{plan.first_counted:,} to the last, since by then allocators and caches are full."
    )


if __name__ == "__main__":
    sys.exit(main())
