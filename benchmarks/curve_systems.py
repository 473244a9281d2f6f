"""The systems on the curve; see `benchmarks.curve`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.batching import BatchOrder
from benchmarks.curve import Burst, tpot_ms
from benchmarks.peers import Order, Peer
from benchmarks.systems import ASSISTED
from specwire import AsyncClient, SamplingParams

CONTINUOUS = "transformers continuous batching"
_TIMEOUT_S = 600.0
"""Of a generation; with 64 streams on a slow machine one takes minutes."""


class Connection:
    """An `AsyncClient` and the event loop that it lives on, in this thread."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient) -> None:
        self.runner = runner
        self.client = client


@contextlib.contextmanager
def connect(address: str) -> Iterator[Connection]:
    """A connection to the coordinator, made when this returns: its cost belongs to no request."""

    async def opened() -> AsyncClient:
        client = AsyncClient(address, timeout_s=_TIMEOUT_S)
        await client.get_model_info()
        return client

    with asyncio.Runner() as runner:
        client = runner.run(opened())
        try:
            yield Connection(runner, client)
        finally:
            runner.run(client.close())


@dataclass(frozen=True)
class _Request:
    """What the reader of one generation saw; times are those of the clock."""

    first_s: float
    end_s: float
    token_ids: list[int]


class SpecwireStreams:
    """The three services, all requests over one connection, timed at the client."""

    def __init__(
        self, name: str, connection: Connection, num_draft_tokens: int | None, *, own_prompts: bool
    ) -> None:
        """`num_draft_tokens` as in `SamplingParams`: None is the server's choice, 0 is none."""
        self.name = name
        self.own_prompts = own_prompts
        self.learns = num_draft_tokens is None
        self._connection = connection
        self._num_draft_tokens = num_draft_tokens

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
        """See `StreamsSystem`."""
        return self._connection.runner.run(self._burst(prompts, num_tokens))

    async def _burst(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
        started_s = time.perf_counter()
        done = await asyncio.gather(*(self._request(prompt, num_tokens) for prompt in prompts))
        return Burst(
            elapsed_s=max(request.end_s for request in done) - started_s,
            token_ids=[request.token_ids for request in done],
            tpots_ms=[tpot_ms(request.first_s, request.end_s, num_tokens) for request in done],
        )

    async def _request(self, prompt: Sequence[int], num_tokens: int) -> _Request:
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, num_draft_tokens=self._num_draft_tokens, ignore_eos=True
        )
        first_s = 0.0
        async with self._connection.client.stream(prompt_token_ids=prompt, params=params) as stream:
            async for chunk in stream:
                if chunk.tokens:
                    first_s = first_s or time.perf_counter()
            return _Request(first_s, time.perf_counter(), [token.token_id for token in stream.tokens])


class AssistedOneByOne:
    """Assisted generation, one request after another, of at most `max_requests` of a burst."""

    name = ASSISTED
    own_prompts = False
    learns = False

    def __init__(
        self, setting: str, peer: Peer, max_requests: int, num_assistant_tokens: int | None = None
    ) -> None:
        self.setting = setting
        self._peer = peer
        self._max_requests = max_requests
        self._num_assistant_tokens = num_assistant_tokens

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
        """See `StreamsSystem`; the time of the burst is the sum of its requests' times."""
        done = [
            self._peer.run(
                Order(
                    prompt_token_ids=prompt,
                    max_new_tokens=num_tokens,
                    temperature=0.0,
                    seed=0,
                    assisted=True,
                    num_assistant_tokens=self._num_assistant_tokens,
                )
            )
            for prompt in prompts[: self._max_requests]
        ]
        return Burst(
            elapsed_s=sum(answer.elapsed_s for answer in done),
            token_ids=[answer.token_ids for answer in done],
            tpots_ms=[tpot_ms(answer.first_s, answer.elapsed_s, num_tokens) for answer in done],
        )


class ContinuousBatching:
    """`generate_batch` with a whole burst at once, timed in the peer process."""

    name = CONTINUOUS
    own_prompts = False
    learns = False

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
        """See `StreamsSystem`."""
        answer = self._peer.run_batch(BatchOrder(prompts=prompts, max_new_tokens=num_tokens))
        return Burst(
            elapsed_s=max(answer.last_s),
            token_ids=answer.token_ids,
            tpots_ms=[
                tpot_ms(first_s, last_s, num_tokens)
                for first_s, last_s in zip(answer.first_s, answer.last_s, strict=True)
            ],
        )


def faster(
    candidates: Sequence[AssistedOneByOne], prompts: Sequence[Sequence[int]], num_tokens: int
) -> AssistedOneByOne:
    """The setting that takes least for these prompts, after a warm-up of each."""
    for candidate in candidates:
        candidate.run(prompts[:1], num_tokens)
    return min(candidates, key=lambda candidate: candidate.run(prompts, num_tokens).elapsed_s)
