"""A client that stops reading: its generation leaves its place after a while, and its stream ends in time.

Many of them at once: tests/faults/test_unread.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

import coordinator.servicer
from specwire import AsyncClient, InvalidRequestError, Rule, SamplingParams, StreamIdleError
from specwire.client.streaming import AsyncStream
from specwire.config.services import VerifyConfig
from specwire.core import MAX_LOGPROBS, MIN_CREDIT_TOKENS
from specwire.rpc import server as rpc_server
from specwire.rpc import statuses
from specwire.rpc.server import Server
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.support.harness import LocalStack, local_stack
from tests.support.paused import DRAFT, PROMPT, TARGET, opening, params, received
from tests.support.processes import wait_until

MAX_RUNNING = 4
IDLE_S = 2.0
SAMPLING = params(150)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    monkeypatch.setattr(coordinator.servicer, "_PAUSE_AFTER_S", 0.3)
    limits = {"max_running": MAX_RUNNING, "idle_timeout_s": IDLE_S}
    with local_stack(TARGET, DRAFT, coordinator_options=limits) as running:
        yield running
        running.assert_idle_within(1.0)
        status = running.client.get_status()
        assert status.num_running == status.num_waiting == status.num_paused == 0


def until(stack: LocalStack, condition: Callable[[generation_pb2.GetStatusResponse], bool]) -> None:
    wait_until(lambda: condition(stack.client.get_status()), 20)


async def read(stream: AsyncStream) -> tuple[int, ...]:
    async for _ in stream:
        pass
    return stream.completion.token_ids


@pytest.mark.slow
def test_an_unread_stream_without_credit(stack: LocalStack) -> None:
    """gRPC's flow control holds the writes back: all that it took comes before the error, in order."""
    window = [("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]
    expected = stack.client.generate(params=params(1_000), prompt_token_ids=PROMPT).token_ids
    with grpc.insecure_channel(stack.address, window) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(iter([opening(0, 1_000, logprobs=MAX_LOGPROBS)]), timeout=30)
        until(stack, lambda status: status.num_paused == 1)
        stack.assert_idle_within(1.0)
        until(stack, lambda status: status.num_paused == status.num_running == 0)
        responses: list[generation_pb2.GenerateResponse] = []
        with pytest.raises(grpc.RpcError) as caught:
            responses.extend(call)
        assert isinstance(statuses.from_rpc_error(caught.value), StreamIdleError)
        token_ids = received(responses)
        assert len(expected) > len(token_ids) > MIN_CREDIT_TOKENS
        assert tuple(token_ids) == expected[: len(token_ids)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", list(Rule))
def test_a_paused_stream_holds_nothing_and_goes_on_to_the_same_text(stack: LocalStack, rule: Rule) -> None:
    sampling = params(150, rule=rule, num_draft_tokens=4)
    expected = stack.client.generate(params=sampling, prompt_token_ids=PROMPT).token_ids
    with stack.client.stream(params=sampling, prompt_token_ids=PROMPT) as stream:
        chunks = iter(stream)
        next(chunks)
        until(stack, lambda status: status.num_paused == 1)
        assert stack.client.get_status().num_running == 0
        stack.assert_idle_within(1.0)
        list(chunks)
        assert stream.completion.token_ids == expected
        assert stream.num_resumes == 0


async def test_a_paused_stream_gets_in_line_when_it_is_read(stack: LocalStack) -> None:
    """Where others read in all places, it waits until one of them is done."""
    async with contextlib.AsyncExitStack() as exits:

        async def begin(sampling: SamplingParams) -> AsyncStream:
            client = await exits.enter_async_context(AsyncClient(stack.address))
            context = client.stream(params=sampling, prompt_token_ids=PROMPT)
            stream = await exits.enter_async_context(context)
            await anext(stream)
            return stream

        paused = await begin(SAMPLING)
        await asyncio.to_thread(until, stack, lambda status: status.num_paused == 1)
        others = [asyncio.create_task(read(await begin(params(10_000)))) for _ in range(MAX_RUNNING)]
        reading = asyncio.create_task(read(paused))
        await asyncio.to_thread(until, stack, lambda status: status.num_waiting == 1)
        assert not reading.done()
        others[0].cancel()
        assert len(await reading) == SAMPLING.max_tokens
        assert paused.num_resumes == 0
        for other in others:
            other.cancel()


async def test_an_error_that_cannot_be_delivered_yet_holds_no_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The status follows what the client has not read; gRPC keeps it, and the call's task ends."""
    ended, abort = asyncio.Event(), rpc_server._abort

    async def noted(context: Any, error: Exception) -> None:
        try:
            await abort(context, error)
        finally:
            ended.set()

    async def write_on(_: object, context: Any) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.2):
                    await context.write(bytes(1000))
        raise InvalidRequestError("x", 1, "is wrong")

    monkeypatch.setattr(rpc_server, "_abort", noted)
    server = Server(VerifyConfig(model=TARGET, grace_s=0.0), [])
    method = grpc.stream_stream_rpc_method_handler(write_on, request_deserializer=bytes)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": method}),))
    address = await server.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        options = [("grpc.http2.bdp_probe", 0)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options))
        call = channel.stream_stream("/s/m")()
        await call.write(b"")
        await asyncio.wait_for(ended.wait(), 10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in call]
        assert isinstance(statuses.from_rpc_error(caught.value), InvalidRequestError)
