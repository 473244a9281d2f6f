"""What is asked of a simulated world: completions one after the other or together, or streams without end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.simulation import virtual_time
from benchmarks.simulation.system import Client, Group, Setting, World
from specwire.core import SamplingParams
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.v1 import generation_pb2
from specwire.wire import client as client_wire

PROMPT = (1, 2, 3)
_ENDLESS = 1 << 19
_NUM_STARTS = 97


def completions(
    setting: Setting, batches: Sequence[Sequence[SamplingParams]]
) -> list[list[generation_pb2.Completion]]:
    """Batches one after the other; the requests of a batch together."""

    async def main() -> list[list[generation_pb2.Completion]]:
        world = World(setting)
        done = [
            await asyncio.gather(*(_completion(world.groups[0], params) for params in batch))
            for batch in batches
        ]
        world.check()
        return done

    return virtual_time.run(main())


def tokens_per_s(completed: Sequence[generation_pb2.Completion]) -> float:
    """Of requests that ran together."""
    num_tokens = sum(done.usage.completion_tokens for done in completed)
    return num_tokens / max(done.timing.total_ms for done in completed) * 1e3


async def _completion(group: Group, params: SamplingParams) -> generation_pb2.Completion:
    client = Client()
    await group.coordinator.generate(_request(params), client)
    assert client.completion is not None
    return client.completion


def _request(params: SamplingParams) -> generation_pb2.GenerateRequest:
    return client_wire.generate_request(None, params, PROMPT)


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Streams that never end, seen for a while after they warmed up.

    Attributes:
        tokens_per_s: of all streams.
        per_device: tokens/s of each target device.
        token_ms_p50, token_ms_p99: of a stream's time for a token, its chunks' tokens counted alike.
        gap_ms_p99: between two chunks of a stream.
        acceptance_length: tokens a chunk.
        hit_rate: rounds whose proposal was there before it was asked for; of those with a proposal.
        num_draft_tokens: proposed a round on average.
        target_busy, draft_busy: parts of the time that devices computed.
    """

    tokens_per_s: float
    per_device: float
    token_ms_p50: float
    token_ms_p99: float
    gap_ms_p99: float
    acceptance_length: float
    hit_rate: float
    num_draft_tokens: float
    target_busy: float
    draft_busy: float


def steady(setting: Setting, num_streams: int, *, warm_up_s: float, measured_s: float) -> Steady:
    """Run `num_streams`, spread over the groups, for so long; their starts are spread over a pass."""

    async def main() -> Steady:
        counts = Counts()
        world = World(setting, counts)
        clients = [Client() for _ in range(num_streams)]
        tasks = [asyncio.create_task(_endless(world, client, i, setting)) for i, client in enumerate(clients)]
        await asyncio.sleep(warm_up_s)
        devices = [group.verify.device for group in world.groups], [d.device for d in world.drafts]
        before = [[device.busy_s for device in kind] for kind in devices]
        counts.start()
        await asyncio.sleep(measured_s)
        world.check()
        for task in tasks:
            if task.done():
                task.result()
        busy = [
            float(np.mean([d.busy_s - b for d, b in zip(kind, past, strict=True)])) / measured_s
            if kind
            else 0
            for kind, past in zip(devices, before, strict=True)
        ]
        return _summary(clients, counts, warm_up_s, measured_s, len(world.groups), busy)

    return virtual_time.run(main())


class Counts(tracing.Tracing):
    """Of rounds since `start`, from the attributes of their spans."""

    enabled = True

    def __init__(self) -> None:
        super().__init__()
        self._round = _RoundSpan(self)
        self.start()

    def start(self) -> None:
        """Forget what was before."""
        self.num_rounds = self.num_drafting = self.num_prepared = self.num_draft_tokens = 0

    def span(self, name: str, **_: Any) -> tracing.Span:
        """Only those of rounds are looked at."""
        return self._round if name == "round" else super().span(name)

    def add(self, num_draft_tokens: int, prepared: bool) -> None:
        """A round is over."""
        self.num_rounds += 1
        self.num_drafting += num_draft_tokens > 0
        self.num_prepared += prepared
        self.num_draft_tokens += num_draft_tokens


class _RoundSpan(tracing.Span):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    @property
    def trace_id(self) -> str:
        """Not empty, as of a span that is recorded."""
        return "simulated"

    def set(self, attributes: tracing.Attributes) -> None:
        num_draft_tokens = attributes[names.NUM_DRAFT_TOKENS]
        assert isinstance(num_draft_tokens, int)
        self._counts.add(num_draft_tokens, bool(attributes[names.DRAFT_PREPARED]))

    def __exit__(self, *_: object) -> None: ...


async def _endless(world: World, client: Client, index: int, setting: Setting) -> None:
    """One of many streams, with a text of its own."""
    num_groups = len(world.groups)
    await asyncio.sleep(setting.target.base_ms / 1e3 * (index // num_groups % _NUM_STARTS) / _NUM_STARTS)
    params = SamplingParams(max_tokens=_ENDLESS, temperature=0, seed=index)
    prompt = [1, 2 + index]  # the next token depends on the last: a shared one makes all texts the same
    await world.groups[index % num_groups].coordinator.generate(
        client_wire.generate_request(None, params, prompt), client
    )


def _summary(
    clients: Sequence[Client],
    counts: Counts,
    warm_up_s: float,
    measured_s: float,
    num_devices: int,
    busy: Sequence[float],
) -> Steady:
    seen = [[(at, num) for at, num in client.arrivals if at >= warm_up_s] for client in clients]
    num_tokens = sum(num for chunks in seen for _, num in chunks)
    num_chunks = sum(map(len, seen))
    gaps = np.array([b[0] - a[0] for chunks in seen for a, b in itertools.pairwise(chunks)])
    tokens = np.array([b[1] for chunks in seen for _, b in itertools.pairwise(chunks)])
    each = np.repeat(gaps / tokens, tokens) if len(gaps) else np.zeros(1)
    return Steady(
        tokens_per_s=num_tokens / measured_s,
        per_device=num_tokens / measured_s / num_devices,
        token_ms_p50=float(np.percentile(each, 50)) * 1e3,
        token_ms_p99=float(np.percentile(each, 99)) * 1e3,
        gap_ms_p99=float(np.percentile(gaps, 99)) * 1e3 if len(gaps) else 0.0,
        acceptance_length=num_tokens / max(1, num_chunks),
        hit_rate=counts.num_prepared / max(1, counts.num_drafting),
        num_draft_tokens=counts.num_draft_tokens / max(1, counts.num_rounds),
        target_busy=busy[0],
        draft_busy=busy[1],
    )
