"""Clients that read nothing: others begin all the same; what is not read ends, and can be gone on with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from benchmarks.processes import Devices
from specwire import AsyncClient, GenerationIdleError, RetryPolicy, Rule, SamplingParams, StreamIdleError
from specwire.cli.supervisor import Stack
from specwire.client.streaming import AsyncStream
from specwire.config.link import Link
from specwire.core import MIN_CREDIT_TOKENS
from specwire.rpc.statuses import from_rpc_error
from specwire.rpc.wire import client as client_wire
from specwire.v1 import generation_pb2_grpc
from tests.support import report
from tests.support.effort import sized
from tests.support.faulty_proxy import FaultyProxy
from tests.support.fronts import front
from tests.support.idle import until_idle

MAX_RUNNING = sized(8, 256)
NUM_STREAMS = sized(16, 500)
NUM_SILENT = sized(12, 256)
NUM_CONNECTIONS, NUM_CHOICES = sized(2, 125), 4
"""Over HTTP: a connection holds some 250 kB, which several generations fill sooner."""
IDLE_S = sized(4, 20)
PARAMS = SamplingParams(max_tokens=200, rule=Rule.GUMBEL, seed=5)
PROMPT = (1, 2, 3)
MAX_START_S = 2.0
"""To the first token of a client that comes when all the others are as far ahead as they may be."""
TIMEOUT_S = 300.0
pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(sized(120, 900))]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    devices = Devices(target_ms=5.0, draft_ms=0.5)
    limits: dict[str, Any] = {"max_running": MAX_RUNNING, "idle_timeout_s": IDLE_S}
    with devices.stack(num_kv_tokens=NUM_STREAMS * 512, **limits) as running:
        yield running


@dataclass
class Probe:
    """New clients, one after the other, each with a connection of its own.

    Attributes:
        start_s: when each came, and how long it then waited for its first token.
    """

    address: str
    start_s: list[tuple[float, float]]

    async def first_token_s(self) -> float:
        """Of one that comes now."""
        async with AsyncClient(self.address, timeout_s=TIMEOUT_S) as client:
            came_s = time.monotonic()
            async with client.stream(params=PARAMS, prompt_token_ids=PROMPT) as stream:
                await anext(stream)
            waited_s = time.monotonic() - came_s
        self.start_s.append((came_s, waited_s))
        return waited_s

    def worst_s(self, since_s: float) -> float:
        """Of those that came from then on."""
        return max(waited_s for came_s, waited_s in self.start_s if came_s >= since_s)


@contextlib.asynccontextmanager
async def probing(stack: Stack) -> AsyncIterator[Probe]:
    """A new client as soon as the one before has begun, while the body runs."""
    async with FaultyProxy(stack.address, Link()) as address:
        probe = Probe(address, [])

        async def probe_on() -> None:
            while True:
                await probe.first_token_s()
                await asyncio.sleep(0.05)

        probing = asyncio.create_task(probe_on())
        yield probe
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)


async def until_ended(client: AsyncClient) -> float:
    """Wait until all but a probe's are paused, and then until they are gone; returns when they paused."""
    began_s, paused_s = time.monotonic(), list[float]()
    while len(paused_s) < 2:
        status = await client.get_status()
        if status.num_running + status.num_waiting <= 1 and bool(status.num_paused) is not bool(paused_s):
            paused_s.append(time.monotonic())
        assert time.monotonic() < began_s + TIMEOUT_S, status
        await asyncio.sleep(0.05)
    return paused_s[0]


def judge(case: str, count: int, probe: Probe, began_s: float, paused_s: float) -> None:
    """New clients began in time."""
    worst_s, flooded_s = probe.worst_s(paused_s), paused_s - began_s
    report.note(
        f"{count} {case}, {MAX_RUNNING} places",
        f"all ended after {IDLE_S} s with STREAM_IDLE; nothing held",
        f"a new client's first token within {worst_s:.2f} s ({len(probe.start_s)} clients), within "
        f"{probe.worst_s(began_s):.2f} s while the {count} still generated, which took {flooded_s:.0f} s",
    )
    assert worst_s < MAX_START_S * sized(2, 1), "twice as long where tests share the machine"


async def read(stream: AsyncStream) -> tuple[int, ...]:
    async for _ in stream:
        pass
    return stream.completion.token_ids


@pytest.mark.slow
async def test_unread_streams_of_the_sdk(stack: Stack) -> None:
    async with (
        AsyncClient(stack.address, timeout_s=TIMEOUT_S, retry=RetryPolicy(resume=False)) as client,
        AsyncClient(stack.address, timeout_s=TIMEOUT_S, retry=RetryPolicy(max_resumes=0)) as resuming,
        contextlib.AsyncExitStack() as exits,
    ):
        expected = (await client.generate(params=PARAMS, prompt_token_ids=PROMPT)).token_ids

        async def unread(client: AsyncClient) -> AsyncStream:
            context = client.stream(params=PARAMS, prompt_token_ids=PROMPT)
            return await exits.enter_async_context(context)

        began_s = time.monotonic()
        async with probing(stack) as probe:
            streams = [await unread(client) for _ in range(NUM_STREAMS - 1)]
            resumed = await unread(resuming)
            paused_s = await until_ended(client)
        assert await read(resumed) == expected
        assert resumed.num_resumes == 1
        for stream in streams:
            with pytest.raises(GenerationIdleError, match="no token was taken") as caught:
                await read(stream)
            assert 0 < caught.value.num_tokens <= MIN_CREDIT_TOKENS
            assert tuple(t.token_id for t in caught.value.tokens) == expected[: caught.value.num_tokens]
        await until_idle(client, stack)
    judge("streams of the SDK that nobody reads", NUM_STREAMS, probe, began_s, paused_s)


@pytest.mark.slow
async def test_streams_that_never_acknowledge(stack: Stack) -> None:
    """Each over a connection of its own: clients that are all alike to the coordinator."""
    request = client_wire.generate_request(None, PARAMS, PROMPT, credit_tokens=MIN_CREDIT_TOKENS)

    async def silent(exits: contextlib.AsyncExitStack) -> Any:
        own = [("grpc.use_local_subchannel_pool", 1)]
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(stack.address, own))
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(timeout=TIMEOUT_S)
        await call.write(request)
        return call

    async with AsyncClient(stack.address) as client, contextlib.AsyncExitStack() as exits:
        began_s = time.monotonic()
        async with probing(stack) as probe:
            calls = [await silent(exits) for _ in range(NUM_SILENT)]
            paused_s = await until_ended(client)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [response async for response in call]
            assert isinstance(from_rpc_error(caught.value), StreamIdleError)
        await until_idle(client, stack)
    judge("streams that never acknowledge", NUM_SILENT, probe, began_s, paused_s)


@pytest.mark.slow
async def test_unread_events(stack: Stack) -> None:
    """Over HTTP; one that is read after all is whole."""
    num_tokens, num_streams = 300, NUM_CONNECTIONS * NUM_CHOICES
    body = {"model": "m", "prompt": PROMPT, "max_tokens": num_tokens, "n": NUM_CHOICES, "stream": True}
    body |= {"logprobs": 20}
    with front(stack.address, model_name="m", timeout_s=TIMEOUT_S) as address:
        connections = [unread_events(address, body) for _ in range(NUM_CONNECTIONS)]
        async with AsyncClient(stack.address) as client:
            began_s = time.monotonic()
            async with probing(stack) as probe:
                paused_s = await until_ended(client)
            received = await asyncio.to_thread(rest_of, connections[0])
            assert b"[DONE]" in received[-64:], received[-300:]
            assert num_tokens_of(received) == NUM_CHOICES * num_tokens
            for connection in connections:
                connection.close()
            await until_idle(client, stack)
    judge("unread streams over HTTP", num_streams, probe, began_s, paused_s)


def unread_events(address: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer stays in the connection, which has little room."""
    host, _, port = address.partition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 10)
    connection.connect((host, int(port)))
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(text)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{text}".encode())
    return connection


def rest_of(connection: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        data = connection.recv(1 << 20)
        assert data, received[-300:]
        received += data
    return bytes(received)


def num_tokens_of(received: bytes) -> int:
    events = [json.loads(data) for data in re.findall(rb"^data: (\{.*\})$", received, re.MULTILINE)]
    said = [choice["logprobs"] for event in events for choice in event["choices"]]
    return sum(len(logprobs["tokens"]) for logprobs in said if logprobs)
