"""Mixed load as it comes in over a day: short and long, both rules, hot and cold, and clients that leave."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from specwire import AsyncClient, Rule, SamplingParams, SpecwireError

_ENDS = ("finish", "cancel", "finish", "disconnect", "finish", "deadline")
_MAX_TOKENS = 48


@dataclass
class Load:
    """Requests drawn from a seed.

    Attributes:
        counts: of requests by how they were meant to end.
        odd: what ended otherwise.
    """

    address: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draws = random.Random(self.seed)

    @property
    def num_cancels(self) -> int:
        """Requests that were not read to their end."""
        return self.counts.total() - self.counts["finish"]

    async def burst(self, client: AsyncClient, duration_s: float, num_together: int) -> None:
        """As fast as so many readers can."""
        end_s = time.monotonic() + duration_s

        async def reader() -> None:
            while time.monotonic() < end_s:
                await self.request(client)

        async with asyncio.TaskGroup() as readers:
            for _ in range(num_together):
                readers.create_task(reader())

    async def steady(self, client: AsyncClient, duration_s: float, per_s: float) -> None:
        """Arrivals at random, so many a second on average."""
        end_s = time.monotonic() + duration_s
        async with asyncio.TaskGroup() as requests:
            while time.monotonic() < end_s:
                requests.create_task(self.request(client))
                await asyncio.sleep(self._draws.expovariate(per_s))

    async def request(self, client: AsyncClient) -> None:
        """One, ended in one of four ways, which take turns."""
        draws = self._draws
        end = _ENDS[self.counts.total() % len(_ENDS)]
        self.counts[end] += 1
        params = SamplingParams(
            max_tokens=_MAX_TOKENS if end != "finish" else draws.randint(1, _MAX_TOKENS),
            temperature=draws.choice((0.0, 0.7, 1.0)),
            rule=draws.choice(list(Rule)),
            top_p=draws.choice((0.9, 1.0)),
            seed=draws.getrandbits(60),
        )
        prompt = [draws.randrange(32) for _ in range(draws.choice((1, 8, 100)))]
        after = draws.randrange(_MAX_TOKENS // 2)
        if end == "disconnect":
            async with AsyncClient(self.address) as leaving:
                await self._read(leaving, params, prompt, after, 60.0, end)
        else:
            timeout_s = draws.uniform(0.002, 0.05) if end == "deadline" else 60.0
            await self._read(client, params, prompt, after if end == "cancel" else 1000, timeout_s, end)

    async def _read(
        self,
        client: AsyncClient,
        params: SamplingParams,
        prompt: list[int],
        after: int,
        timeout_s: float,
        end: str,
    ) -> None:
        """Up to `after` tokens; to leave a client's context closes its connection under the stream."""
        context = client.stream(params=params, prompt_token_ids=prompt, timeout_s=timeout_s)
        stream = await context.__aenter__()
        try:
            async for _ in stream:
                if len(stream.tokens) >= after:
                    break
            if end == "disconnect":
                await client.close()
        except SpecwireError as error:
            if (end, error.status) != ("deadline", "DEADLINE_EXCEEDED"):
                self.odd.append(f"{end}: {error}")
        finally:
            await context.__aexit__(None, None, None)
