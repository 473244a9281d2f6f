"""What is asked of a simulated world: completions one after the other or together, or streams without end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.simulation import virtual_time
from benchmarks.simulation.system import Client, Setting, World
from specwire.core import SamplingParams
from specwire.rpc.wire import client as client_wire
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.v1 import generation_pb2

PROMPT = (1, 2, 3)
_ENDLESS = 1 << 19
_NUM_STARTS = 97


def completions(
    setting: Setting, batches: Sequence[Sequence[SamplingParams]]
) -> list[list[generation_pb2.Completion]]:
    """Batches one after the other; the requests of a batch together."""

    async def main() -> list[list[generation_pb2.Completion]]:
        world = World(setting)
        done = [await asyncio.gather(*(_completion(world, params) for params in batch)) for batch in batches]
        world.check()
        return done

    return virtual_time.run(main())


def tokens_per_s(completed: Sequence[generation_pb2.Completion]) -> float:
    """Of requests that ran together."""
    num_tokens = sum(done.usage.completion_tokens for done in completed)
    return num_tokens / max(done.timing.total_ms for done in completed) * 1e3


async def _completion(world: World, params: SamplingParams) -> generation_pb2.Completion:
    client = Client()
    await world.coordinator.generate(client_wire.generate_request(None, params, PROMPT), client)
    assert client.completion is not None
    return client.completion


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Streams that never end, seen for a while after they warmed up.

    Attributes:
        tokens_per_s: of all streams.
        hit_rate: rounds whose proposal was there before it was asked for; of those with a proposal.
        num_draft_tokens: proposed a round on average.
    """

    tokens_per_s: float
    hit_rate: float
    num_draft_tokens: float


def steady(setting: Setting, num_streams: int, *, warm_up_s: float, measured_s: float) -> Steady:
    """Run `num_streams` for so long; their starts are spread over a pass."""

    async def main() -> Steady:
        counts = Counts()
        world = World(setting, counts)
        clients = [Client() for _ in range(num_streams)]
        tasks = [asyncio.create_task(_endless(world, client, i, setting)) for i, client in enumerate(clients)]
        await asyncio.sleep(warm_up_s)
        counts.start()
        await asyncio.sleep(measured_s)
        world.check()
        for task in tasks:
            if task.done():
                task.result()
        num_tokens = sum(num for client in clients for at_s, num in client.arrivals if at_s >= warm_up_s)
        return Steady(
            tokens_per_s=num_tokens / measured_s,
            hit_rate=counts.num_prepared / max(1, counts.num_drafting),
            num_draft_tokens=counts.num_draft_tokens / max(1, counts.num_rounds),
        )

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
    await asyncio.sleep(setting.target.base_ms / 1e3 * (index % _NUM_STARTS) / _NUM_STARTS)
    params = SamplingParams(max_tokens=_ENDLESS, temperature=0, seed=index)
    prompt = [1, 2 + index]  # the next token depends on the last: a shared one makes all texts the same
    await world.coordinator.generate(client_wire.generate_request(None, params, prompt), client)
