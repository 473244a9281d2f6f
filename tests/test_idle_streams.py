"""Clients that stop reading: their places serve others after a second, and their streams end in time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import pytest

from specwire import AsyncClient, Client, RetryPolicy, Rule, SamplingParams, StreamIdleError
from specwire.core import MAX_LOGPROBS, MIN_CREDIT_TOKENS
from specwire.delay_proxy import DelayProxy, Link
from specwire.rpc import from_rpc_error
from specwire.streaming import AsyncStream
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.harness import LocalStack, LoopThread, local_stack
from tests.test_credit import DRAFT, PROMPT, TARGET, opening, params, received

MAX_RUNNING = 4
IDLE_S = 2.0
START_S = 2.0
"""Longest wait of a new client for its first token, whoever does not read."""
LAW = params(150)
NO_RESUME = RetryPolicy(resume=False)


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    limits = {"max_running": MAX_RUNNING, "idle_timeout_s": IDLE_S}
    with local_stack(TARGET, DRAFT, coordinator_options=limits) as running:
        yield running
        running.assert_idle_within(1.0)
        status = running.client.get_status()
        assert status.num_running == status.num_waiting == status.num_paused == 0


def until(stack: LocalStack, condition: Callable[[generation_pb2.GetStatusResponse], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition(status := stack.client.get_status()):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)


@pytest.fixture
def elsewhere(stack: LocalStack) -> Iterator[str]:
    """The coordinator at another address: in one process, clients of the same address share a connection."""
    with contextlib.ExitStack() as exits:
        thread = LoopThread()
        exits.callback(thread.close)
        yield exits.enter_context(thread.entered(lambda: DelayProxy(stack.address, Link())))


def first_token_s(address: str) -> float:
    """How long a client that comes now waits for it."""
    with Client(address) as client:
        started_s = time.monotonic()
        with client.stream(params=LAW, prompt_token_ids=PROMPT) as stream:
            next(iter(stream))
            return time.monotonic() - started_s


@contextlib.asynccontextmanager
async def unread(client: AsyncClient, count: int) -> AsyncIterator[list[AsyncStream]]:
    """Streams of the SDK that nobody reads."""
    async with contextlib.AsyncExitStack() as streams:
        contexts = [client.stream(params=LAW, prompt_token_ids=PROMPT) for _ in range(count)]
        yield [await streams.enter_async_context(context) for context in contexts]


async def read(stream: AsyncStream) -> tuple[int, ...]:
    async for _ in stream:
        pass
    return stream.completion.token_ids


def test_streams_that_nobody_reads(stack: LocalStack, elsewhere: str) -> None:
    """Three times as many as there are places: others start, all end, and those read later are whole."""
    expected = stack.client.generate(params=LAW, prompt_token_ids=PROMPT).token_ids

    async def run() -> None:
        async with (
            AsyncClient(stack.address, retry=NO_RESUME) as strict,
            AsyncClient(stack.address) as resuming,
            unread(strict, 3 * MAX_RUNNING - 1) as ended,
            unread(resuming, 1) as [resumed],
        ):
            await asyncio.to_thread(until, stack, lambda status: status.num_running == MAX_RUNNING)
            assert await asyncio.to_thread(first_token_s, elsewhere) < START_S
            await asyncio.to_thread(until, stack, lambda status: status.num_finished == 2 + 3 * MAX_RUNNING)
            assert await read(resumed) == expected
            assert resumed.num_resumes == resumed.completion.num_resumes == 1
            for stream in ended:
                with pytest.raises(StreamIdleError, match=r"no token was taken for 2 s") as caught:
                    await read(stream)
                token_ids = tuple(token.token_id for token in caught.value.tokens)
                assert token_ids == expected[: caught.value.num_tokens]
                assert 0 < caught.value.num_tokens <= MIN_CREDIT_TOKENS

    asyncio.run(run())


def test_streams_that_never_acknowledge(stack: LocalStack, elsewhere: str) -> None:
    """They read all that comes, and say nothing."""
    num_streams = 2 * MAX_RUNNING
    with grpc.insecure_channel(stack.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        silent = [stub.Generate(iter([opening(64)]), timeout=30) for _ in range(num_streams)]
        until(stack, lambda status: status.num_running == MAX_RUNNING)
        assert first_token_s(elsewhere) < START_S
        for call in silent:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert isinstance(from_rpc_error(caught.value), StreamIdleError)


def test_a_stream_without_credit_that_nobody_reads(stack: LocalStack) -> None:
    """gRPC's flow control holds the writes back: all that it took comes before the error, in order."""
    window = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    expected = stack.client.generate(params=params(2_000), prompt_token_ids=PROMPT).token_ids
    with grpc.insecure_channel(stack.address, window) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(iter([opening(0, 2_000, logprobs=MAX_LOGPROBS)]), timeout=30)
        until(stack, lambda status: status.num_paused == 1)
        stack.assert_idle_within(1.0)
        until(stack, lambda status: status.num_paused == status.num_running == 0)
        responses: list[generation_pb2.GenerateResponse] = []
        with pytest.raises(grpc.RpcError) as caught:
            responses.extend(call)
        assert isinstance(from_rpc_error(caught.value), StreamIdleError)
        token_ids = received(responses)
        assert len(expected) > len(token_ids) > MIN_CREDIT_TOKENS
        assert tuple(token_ids) == expected[: len(token_ids)]


@pytest.mark.parametrize("rule", list(Rule))
def test_a_paused_stream_holds_nothing_and_goes_on_to_the_same_text(stack: LocalStack, rule: Rule) -> None:
    law = params(150, rule=rule, num_draft_tokens=4)
    expected = stack.client.generate(params=law, prompt_token_ids=PROMPT).token_ids
    with stack.client.stream(params=law, prompt_token_ids=PROMPT) as stream:
        chunks = iter(stream)
        next(chunks)
        until(stack, lambda status: status.num_paused == 1)
        assert stack.client.get_status().num_running == 0
        stack.assert_idle_within(1.0)
        list(chunks)
        assert stream.completion.token_ids == expected
        assert stream.num_resumes == 0


def test_a_paused_stream_gets_in_line_when_it_is_read(stack: LocalStack) -> None:
    """Where others read in all places, it waits until one of them is done."""

    async def run() -> None:
        async with contextlib.AsyncExitStack() as exits:

            async def begin(law: SamplingParams) -> AsyncStream:
                client = await exits.enter_async_context(AsyncClient(stack.address))
                context = client.stream(params=law, prompt_token_ids=PROMPT)
                stream = await exits.enter_async_context(context)
                await anext(stream)
                return stream

            paused = await begin(LAW)
            await asyncio.to_thread(until, stack, lambda status: status.num_paused == 1)
            others = [asyncio.create_task(read(await begin(params(10_000)))) for _ in range(MAX_RUNNING)]
            reading = asyncio.create_task(read(paused))
            await asyncio.to_thread(until, stack, lambda status: status.num_waiting == 1)
            assert not reading.done()
            others[0].cancel()
            assert len(await reading) == LAW.max_tokens
            assert paused.num_resumes == 0
            for other in others:
                other.cancel()

    asyncio.run(run())


def test_a_slow_reader_is_never_ended(stack: LocalStack) -> None:
    """It takes one token after the other, each in a third of the time in which it may take none."""
    with stack.client.stream(params=params(150, num_draft_tokens=0), prompt_token_ids=PROMPT) as stream:
        chunks = iter(stream)
        for _ in range(8):
            time.sleep(IDLE_S / 3)
            assert len(next(chunks).tokens) == 1
        assert stream.num_resumes == 0
        assert stack.client.get_status().num_finished == 0
