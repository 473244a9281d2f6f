"""Streams on one coordinator, run when a line on standard input orders them.

A program rather than a module: it imports nothing but the SDK, so `benchmarks.rounds` can run it against the
services of another checkout, with the client of that checkout.

It answers an order with three lines of JSON: when each stream has had its first tokens, when one of them has
had all, and when all have ended. Between the first two, every stream makes rounds and nothing else.
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


class Window:
    """From the moment when each stream has had `first` tokens to that when one has had `last`.

    Attributes:
        num_tokens: that all streams had in it.
        elapsed_s: from one moment to the other.
    """

    def __init__(self, num_streams: int, first: int, last: int) -> None:
        self.num_tokens = 0
        self.elapsed_s = 0.0
        self._counts = [0] * num_streams
        self._num_waiting = num_streams
        self._first, self._last = first, last
        self._started_s = 0.0

    def add(self, index: int, num_tokens: int) -> None:
        """Stream `index` has had more tokens.

        Raises:
            RuntimeError: it has had all, and another one not yet its first.
        """
        before = self._counts[index]
        after = self._counts[index] = before + num_tokens
        if self._num_waiting:
            self._num_waiting -= before < self._first <= after
            if after >= self._last:
                raise RuntimeError(f"{self._num_waiting} streams have not begun when one has had all tokens")
            if not self._num_waiting:
                self._started_s = time.perf_counter()
                _say({})
        elif not self.elapsed_s:
            self.num_tokens += num_tokens
            if after >= self._last:
                self.elapsed_s = time.perf_counter() - self._started_s
                _say({})


def prompt(index: int) -> list[int]:
    """Prompts of different lengths and tokens: streams of equal texts would accept and reject in step."""
    return [1 + (7 * index + 3 * i) % 30 for i in range(8 + index % 24)]


async def generate(
    client: AsyncClient, index: int, num_tokens: int, window: Window
) -> tuple[Completion, list[float]]:
    """One greedy stream; with its completion the times between its chunks, in milliseconds."""
    arrived_s = []
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    async with client.stream(params=params, prompt_token_ids=prompt(index)) as stream:
        async for chunk in stream:
            arrived_s.append(time.perf_counter())
            window.add(index, len(chunk.tokens))
    return stream.completion, [(later - sooner) * 1e3 for sooner, later in pairwise(arrived_s)]


async def generate_all(client: AsyncClient, num_streams: int, num_tokens: int) -> dict[str, float]:
    """All streams at once.

    Returns:
        `elapsed_s` and `num_tokens` of the window; `tokens_per_round` and `hit_rate` of all streams,
        `usual_round_ms`, the median time between two chunks of a stream.
    """
    window = Window(num_streams, num_tokens // 8, num_tokens)
    found = await asyncio.gather(*(generate(client, i, num_tokens, window) for i in range(num_streams)))
    speculations = [completion.speculation for completion, _ in found]
    num_rounds = sum(speculation.num_rounds for speculation in speculations)
    return {
        "elapsed_s": window.elapsed_s,
        "num_tokens": window.num_tokens,
        "tokens_per_round": sum(len(completion.token_ids) for completion, _ in found) / num_rounds,
        "hit_rate": sum(speculation.num_prepared for speculation in speculations) / num_rounds,
        "usual_round_ms": statistics.median(gap_ms for _, gaps_ms in found for gap_ms in gaps_ms),
    }


def _say(found: dict[str, float]) -> None:
    print(json.dumps(found), flush=True)


async def _serve(address: str) -> None:
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        for line in sys.stdin:
            _say(await generate_all(client, **json.loads(line)))


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
