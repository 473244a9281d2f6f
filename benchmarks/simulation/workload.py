"""What is asked of a simulated world: completions, one after the other or together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.simulation import virtual_time
from benchmarks.simulation.system import Client, Setting, World
from specwire.core import SamplingParams
from specwire.rpc.wire import client as client_wire
from specwire.v1 import generation_pb2


def completions(
    setting: Setting, batches: Sequence[Sequence[SamplingParams]]
) -> list[list[generation_pb2.Completion]]:
    """Batches one after the other; the requests of a batch together."""

    async def main() -> list[list[generation_pb2.Completion]]:
        world = World(setting)
        done = [
            await asyncio.gather(*(_completion(world, params, index) for index, params in enumerate(batch)))
            for batch in batches
        ]
        world.check()
        return done

    return virtual_time.run(main())


def tokens_per_s(completed: Sequence[generation_pb2.Completion]) -> float:
    """Of requests that ran together."""
    num_tokens = sum(done.usage.completion_tokens for done in completed)
    return num_tokens / max(done.timing.total_ms for done in completed) * 1e3


async def _completion(world: World, params: SamplingParams, index: int) -> generation_pb2.Completion:
    """Of one of a batch, with a text of its own: the next token depends on the last one alone."""
    client = Client()
    await world.coordinator.generate(client_wire.generate_request(None, params, [1, 2, 3 + index]), client)
    assert client.completion is not None
    return client.completion
