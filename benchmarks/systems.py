"""The systems side by side, one stream and many: each takes the same work and says how long it took."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.batching import BatchOrder
from benchmarks.names import ASSISTED, ASSISTED_CONSTANT, CONTINUOUS, PLAIN
from benchmarks.peers import Order, Peer
from specwire import AsyncClient, Client, SamplingParams
from specwire.completion import Stage, Timing
from tools.bench.metrics import RequestRecord

CONSTANT_TOKENS = 4
"""Guesses a round of the assisted generation with a constant number."""
_TIMEOUT_S = 600.0
"""Of a generation; with 64 streams on a slow machine one takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One prompt to continue by exactly `num_tokens` tokens."""

    prompt_token_ids: Sequence[int]
    num_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one system made of it.

    Attributes:
        elapsed_s: from the request to the last token, prefill included.
        num_passes: forward passes of the target, the prefill's counted.
        own_ms: the coordinator's own time over all rounds; specwire only.
        stages_ms: of all rounds, by stage; specwire only.
    """

    elapsed_s: float
    token_ids: Sequence[int]
    num_passes: int
    own_ms: float = 0.0
    stages_ms: Mapping[str, float] = field(default_factory=dict)


class System(Protocol):
    """One way to generate."""

    name: str

    def generate(self, work: Work) -> Sample:
        """Do the work once."""
        ...


class TransformersSystem:
    """`generate` in the peer process, timed there."""

    def __init__(
        self, name: str, peer: Peer, *, assisted: bool, num_assistant_tokens: int | None = None
    ) -> None:
        self.name = name
        self._peer = peer
        self._assisted = assisted
        self._num_assistant_tokens = num_assistant_tokens

    def generate(self, work: Work) -> Sample:
        """See `System`."""
        answer = self._peer.run(
            Order(
                prompt_token_ids=work.prompt_token_ids,
                max_new_tokens=work.num_tokens,
                temperature=work.temperature,
                seed=work.seed,
                assisted=self._assisted,
                num_assistant_tokens=self._num_assistant_tokens,
            )
        )
        return Sample(elapsed_s=answer.elapsed_s, token_ids=answer.token_ids, num_passes=answer.num_passes)


def transformers_systems(peer: Peer) -> list[System]:
    """Its own ways to generate."""
    return [
        TransformersSystem(PLAIN, peer, assisted=False),
        TransformersSystem(ASSISTED, peer, assisted=True),
        TransformersSystem(ASSISTED_CONSTANT, peer, assisted=True, num_assistant_tokens=CONSTANT_TOKENS),
    ]


class SpecwireSystem:
    """The three services, through the public client and timed at the client."""

    def __init__(self, name: str, client: Client, num_draft_tokens: int | None) -> None:
        """`num_draft_tokens` as in `SamplingParams`: None is the server's choice, 0 is none."""
        self.name = name
        self._client = client
        self._num_draft_tokens = num_draft_tokens

    def generate(self, work: Work) -> Sample:
        """See `System`."""
        params = SamplingParams(
            max_tokens=work.num_tokens,
            temperature=work.temperature,
            seed=work.seed,
            num_draft_tokens=self._num_draft_tokens,
            ignore_eos=True,
        )
        started_s = time.perf_counter()
        done = self._client.generate(prompt_token_ids=work.prompt_token_ids, params=params)
        return Sample(
            elapsed_s=time.perf_counter() - started_s,
            token_ids=done.token_ids,
            num_passes=done.speculation.num_rounds,
            own_ms=own_ms(done.timing),
            stages_ms={stage.value: done.timing.of(stage) for stage in Stage},
        )


def own_ms(timing: Timing) -> float:
    """The coordinator's own time: the rule, text, messages to the client, and the rest of its work."""
    return timing.of(Stage.RULE, Stage.EMIT, Stage.COORDINATOR)


# --- many streams ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Requests that started together, all done.

    Attributes:
        elapsed_s: from the first request to the last token of all.
        token_ids: [num_requests][num_tokens].
        tpots_ms: [num_requests] time per output token as its reader saw it, in milliseconds.
    """

    elapsed_s: float
    token_ids: Sequence[Sequence[int]]
    tpots_ms: Sequence[float]


def tpot_ms(first_s: float, end_s: float, num_tokens: int) -> float:
    """Time per output token after the first, as `tools.bench.metrics` defines it; of at least two."""
    record = RequestRecord(start_s=0.0, end_s=end_s, chunk_times_s=[first_s], num_output_tokens=num_tokens)
    value = record.tpot_ms
    assert value is not None, "one token has no time per token after the first"
    return value


class StreamsSystem(Protocol):
    """One way to serve many requests.

    Attributes:
        own_prompts: it shares a prefix cache with another system, so it must not get that one's prompts.
        learns: it adapts itself to the load, and is measured when it has.
    """

    name: str
    own_prompts: bool
    learns: bool

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Burst:
        """Continue all prompts, begun together, by `num_tokens` tokens each, greedily."""
        ...


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
