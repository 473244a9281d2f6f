"""Streams on one coordinator, run when a line on standard input orders them.

A program rather than a module: it imports nothing but the SDK, so `benchmarks.rounds` can run it against the
services of another checkout, with the client of that checkout.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from itertools import pairwise

from specwire import AsyncClient, SamplingParams
from specwire.completion import Completion

TIMEOUT_S = 600.0


def prompt(index: int) -> list[int]:
    """Prompts of different lengths and tokens: streams of equal texts would accept and reject in step."""
    return [1 + (7 * index + 3 * i) % 30 for i in range(8 + index % 24)]


async def generate(client: AsyncClient, index: int, num_tokens: int) -> tuple[Completion, list[float]]:
    """One greedy stream; with its completion the times between its chunks, in milliseconds."""
    arrived_s = []
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    async with client.stream(params=params, prompt_token_ids=prompt(index)) as stream:
        async for _ in stream:
            arrived_s.append(time.perf_counter())
    return stream.completion, [(later - sooner) * 1e3 for sooner, later in pairwise(arrived_s)]


async def generate_all(client: AsyncClient, num_streams: int, num_tokens: int) -> dict[str, float]:
    """All streams at once.

    Returns:
        `elapsed_s` until the last has ended; `num_tokens`, `num_rounds` and `num_hits`, rounds whose proposal
        was prepared, of all together; `usual_round_ms`, the median time between two chunks of a stream.
    """
    started_s = time.perf_counter()
    found = await asyncio.gather(*(generate(client, i, num_tokens) for i in range(num_streams)))
    elapsed_s = time.perf_counter() - started_s
    speculations = [completion.speculation for completion, _ in found]
    return {
        "elapsed_s": elapsed_s,
        "num_tokens": sum(len(completion.token_ids) for completion, _ in found),
        "num_rounds": sum(speculation.num_rounds for speculation in speculations),
        "num_hits": sum(speculation.num_prepared for speculation in speculations),
        "usual_round_ms": statistics.median(gap_ms for _, gaps_ms in found for gap_ms in gaps_ms),
    }


async def _serve(address: str) -> None:
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        for line in sys.stdin:
            print(json.dumps(await generate_all(client, **json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
