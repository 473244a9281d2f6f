"""Peers that send what is no message, or messages that contradict each other: each is a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from specwire import AsyncClient, Client, SamplingParams
from specwire.client.resume import ReceivedTokens
from specwire.client.streaming import AsyncStream
from specwire.errors import InternalError
from specwire.rpc.wire.client import generate_request
from specwire.v1 import common_pb2, generation_pb2
from tests.support.harness import LOOPBACK, local_stack, on_own_loop
from tests.support.processes import wait_until

GARBLED = b"\xff\xff\xff"
PARAMS = SamplingParams(max_tokens=4)
INFO = generation_pb2.ResumeInfo(seed=7, rule=common_pb2.RULE_GUMBEL, context_digest="d")
OTHER = generation_pb2.ResumeInfo(seed=8, rule=common_pb2.RULE_GUMBEL, context_digest="d")


def token(token_id: int, **fields: Any) -> generation_pb2.Token:
    return generation_pb2.Token(id=token_id, text="x", fate=generation_pb2.FATE_PLAIN, **fields)


def message(info: Any = None, **fields: Any) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(chunk=generation_pb2.Chunk(**fields), resume_info=info)


def end(num_tokens: int) -> generation_pb2.Completion:
    return generation_pb2.Completion(
        finish_reason=generation_pb2.FINISH_REASON_LENGTH,
        rule=common_pb2.RULE_GUMBEL,
        usage=generation_pb2.Usage(completion_tokens=num_tokens),
    )


class FakeCoordinator:
    """Answers with what it is given: `answers` of a generation, `answer` of any other call."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.answer = GARBLED
        self.address = ""

    async def __aenter__(self) -> FakeCoordinator:
        self._server = grpc.aio.server()
        names = ("GetModelInfo", "GetStatus")
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._answer) for name in names}
        handlers["Generate"] = grpc.stream_stream_rpc_method_handler(self._generate)
        name = "specwire.v1.GenerationService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port(LOOPBACK)}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def _answer(self, _: Any, context: Any) -> bytes:
        return self.answer

    async def _generate(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        await anext(requests)
        for answer in self.answers:
            yield answer
        await asyncio.sleep(60)


@pytest.fixture
def fake() -> Iterator[FakeCoordinator]:
    with on_own_loop(FakeCoordinator) as running:
        yield running


@pytest.fixture
def client(fake: FakeCoordinator) -> Iterator[Client]:
    with Client(fake.address, timeout_s=10.0) as client:
        yield client


def test_bytes_of_a_coordinator_that_are_no_message(fake: FakeCoordinator, client: Client) -> None:
    fake.answers = [GARBLED]
    calls: list[Callable[[], object]] = [
        lambda: client.generate("x", PARAMS),
        client.get_status,
        client.get_model_info,
    ]
    for call in calls:
        with pytest.raises(InternalError, match=rf"{fake.address}: .* no message of the protocol"):
            call()


def test_a_message_that_is_too_large_is_not_the_prompts_fault(fake: FakeCoordinator, client: Client) -> None:
    fake.answers = [b"x" * (65 << 20)]
    with pytest.raises(InternalError, match="sent too large a message"):
        client.generate("x", PARAMS)


def test_nothing_comes_after_a_contradiction(fake: FakeCoordinator, client: Client) -> None:
    again = [message(INFO, tokens=[token(1)]), message(tokens=[token(2)])]
    after = [message(first_index=1, tokens=[token(3)]), generation_pb2.GenerateResponse(completion=end(2))]
    fake.answers = [each.SerializeToString() for each in (*again, *after)]
    with client.stream("x", PARAMS) as stream:
        for _ in range(3):
            with pytest.raises(InternalError, match="after 1 tokens came number 0"):
                list(stream)
        assert [each.token_id for each in stream.tokens] == [1]


def test_several_readers_of_a_stream_share_its_chunks(fake: FakeCoordinator) -> None:
    chunks = [message(INFO, tokens=[token(1)]), message(first_index=1, tokens=[token(2)])]
    answers = [*chunks, generation_pb2.GenerateResponse(completion=end(2))]
    fake.answers = [each.SerializeToString() for each in answers]

    async def ids_of(stream: AsyncStream) -> list[int]:
        return [token_id async for chunk in stream for token_id in chunk.token_ids]

    async def read() -> list[int]:
        async with AsyncClient(fake.address) as client, client.stream("x", PARAMS) as stream:
            both = await asyncio.gather(ids_of(stream), ids_of(stream))
            assert stream.completion.num_resumes == 0
            return sorted(both[0] + both[1])

    assert asyncio.run(read()) == [1, 2]


WRONG: dict[str, list[generation_pb2.GenerateResponse]] = {
    "5 tokens came where max_tokens is 4": [message(tokens=[token(i) for i in range(5)])],
    "goes on with": [message(INFO, tokens=[token(1)]), message(OTHER, first_index=1, tokens=[token(2)])],
    "neither a chunk nor a completion": [generation_pb2.GenerateResponse()],
    "after 0 tokens of the prompt came number 3": [message(prompt=[token(1)], first_prompt_index=3)],
    "source 2 ": [message(tokens=[token(1, source=2)], sources=["ngram"])],
    "source -1 ": [message(tokens=[token(1, source=-1)], sources=["ngram"])],
}


@pytest.mark.parametrize("problem", WRONG)
def test_messages_that_contradict_each_other(problem: str) -> None:
    received = ReceivedTokens(generate_request("x", PARAMS))
    *before, wrong = WRONG[problem]
    for each in before:
        received.take(each)
    with pytest.raises(InternalError, match=problem):
        received.take(wrong)


def test_an_output_that_has_not_come() -> None:
    received = ReceivedTokens(generate_request("x", PARAMS))
    received.take(message(tokens=[token(1)], held=[token(2)]))
    with pytest.raises(InternalError, match="1 tokens were held back"):
        received.check_end(end(2))
    received.take(message(first_index=1, tokens=[token(2)]))
    received.check_end(end(2))
    with pytest.raises(InternalError, match="2 tokens came of an output of 3"):
        received.check_end(end(3))


@pytest.mark.parametrize(
    "kind",
    [
        "VerifyResponse",
        "VerifyServiceGetModelInfoResponse",
        "DraftResponse",
        "DraftServiceGetModelInfoResponse",
    ],
)
def test_bytes_of_a_model_service_that_are_no_message(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service counts as lost, and is looked after: it is used again."""
    left = [0]

    def garbling(make: Any) -> Any:
        def made(served: Any, request_deserializer: Any = None, response_serializer: Any = None) -> Any:
            def serialize(answer: Any) -> bytes:
                if type(answer).__name__ == kind and left[0]:
                    left[0] -= 1
                    return GARBLED
                return bytes(response_serializer(answer))

            return make(served, request_deserializer, serialize)

        return made

    for name in ("stream_unary_rpc_method_handler", "stream_stream_rpc_method_handler"):
        monkeypatch.setattr(grpc, name, garbling(getattr(grpc, name)))
    emulated = "emulated:step_ms=0"
    with local_stack(emulated, emulated) as stack:
        left[0] = 1

        def is_back() -> bool:
            done = stack.client.generate(None, PARAMS, prompt_token_ids=[1])
            assert len(done.token_ids) == 4
            status = stack.client.get_status()
            replicas = [*status.verify_replicas, *status.draft_replicas]
            was_lost = sum(each.num_lost for each in replicas) == 1
            return was_lost and not done.speculation.draft_unavailable

        wait_until(is_back, 10.0)
