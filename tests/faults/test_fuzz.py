"""Mutated messages on every method: no process crashes, no status is INTERNAL, others are served."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from specwire import Rule, SamplingParams
from specwire.core import Preparation, Proposal
from specwire.engine.boot import ModelService
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import VerifyOrder
from specwire.support import Support
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from tests.support import report
from tests.support.effort import sized
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, is_serving, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.model_streams import draft, opening, sampling, verify
from tests.support.mutations import mutated_bytes, mutated_conversation

NUM_MESSAGES = sized(60, 5_000)  # of each kind, for each method
NUM_THREADS = 8
TIMEOUT_S = 60.0
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=11, rule=Rule.GUMBEL)
OK = grpc.StatusCode.OK
FINE = {
    OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,  # health of an unknown service
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
MOST_TOKENS = 15
"""Of a generation; one that got so many may wait for an acknowledgement, which a mutant does not send."""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(sized(300, 1800))]
services = entered(started_services)


@pytest.fixture(scope="module")
def stack(services: dict[str, ModelService], pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    with local_stack(*pair) as running:
        yield running


# --- every method, and what is said on it when nothing is wrong ------------------------------------


@dataclass(frozen=True)
class Method:
    """One method, which its descriptor describes.

    Attributes:
        service: role of the service that has it.
        conversations: requests of a call, each a list.
        most_answers: after which the caller leaves.
    """

    service: str
    descriptor: MethodDescriptor
    conversations: Sequence[Sequence[Message]]
    most_answers: int = 1000

    @property
    def path(self) -> str:
        return f"/{self.descriptor.containing_service.full_name}/{self.descriptor.name}"

    @property
    def is_stream(self) -> bool:
        return bool(self.descriptor.client_streaming)

    @property
    def answer(self) -> Any:
        """Type of what comes back."""
        return GetMessageClass(self.descriptor.output_type)

    @property
    def answers_stream(self) -> bool:
        return bool(self.descriptor.server_streaming)


GUMBEL = sampling(rule=common_pb2.RULE_GUMBEL)
REJECTION = sampling(rule=common_pb2.RULE_REJECTION, temperature=0.8, top_p=0.9, min_p=0.01, logprobs=2)
PENALTIES = sampling(
    rule=common_pb2.RULE_GUMBEL, top_k=5, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={7: 2.0}
)
GREEDY = sampling(rule=common_pb2.RULE_REJECTION, temperature=0.0, frequency_penalty=-0.5)
PAIRS = ((GUMBEL, REJECTION), (REJECTION, GREEDY), (PENALTIES, GUMBEL), (GREEDY, REJECTION))
SUPPORT = Support(np.array([6, 7, 9]), np.array([0.5, 0.25, 0.25], np.float32))
TRACED = f"00-{'1' * 32}-{'2' * 16}-01"


def verified(first: common_pb2.SamplingParams, other: common_pb2.SamplingParams) -> list[Message]:
    """Two sequences; what the second one commits is one request behind the first one."""

    def judged(sampling: common_pb2.SamplingParams) -> dict[str, Any]:
        supports = [SUPPORT, SUPPORT] if sampling is REJECTION else []
        return {"proposal": Proposal(0, [6, 7], supports)}

    begun, order = [opening(1, sampling=first), opening(2, sampling=other)], VerifyOrder
    return [
        verify(order(1, 1, 0, [3, 4, 5], **judged(first)), opened=begun[:1]),
        verify(
            order(1, 2, 4, [9], **judged(first), traceparent=TRACED),
            order(2, 1, 0, [3, 4], **judged(other)),
            opened=begun[1:],
        ),
        verify(order(1, 3, 5, [10, 11]), order(2, 2, 3, [12], **judged(other))),
        verify(order(2, 3, 4, [13]), closed=[1]),
    ]


def drafted(first: common_pb2.SamplingParams, other: common_pb2.SamplingParams) -> list[Message]:
    """As `verified`."""
    ahead, order = Preparation(4, 3), DraftOrder
    begun = [opening(1, sampling=first), opening(2, sampling=other)]
    return [
        draft(order(1, 1, 0, [3, 4, 5], 3, prepare=ahead), opened=begun[:1]),
        draft(order(1, 2, 4, [9], 2), order(2, 1, 0, [3, 4], 2, prepare=ahead), opened=begun[1:]),
        draft(order(1, 3, 5, [10, 11], 0, prepare=ahead), order(2, 2, 3, [12], 0)),
        draft(order(2, 3, 4, [13], 1), closed=[1]),
    ]


def generation(sampling: common_pb2.SamplingParams, **prompt: Any) -> list[Message]:
    request = generation_pb2.GenerateRequest
    stops = generation_pb2.StopConditions(max_tokens=8, stop=["fox"], stop_token_ids=[2], ignore_eos=True)
    first = request(sampling=sampling, stop_conditions=stops, credit_tokens=64, **prompt)
    return [first, request(credit_tokens=5), request(credit_tokens=3)]


CHAT = generation_pb2.Messages(messages=[generation_pb2.Message(role="user", content="Hello, hello world!")])
GENERATIONS = [
    generation(GUMBEL, token_ids=generation_pb2.TokenIds(ids=[3, 4, 5])),
    generation(REJECTION, text="The quick brown", num_draft_tokens=2),
    generation(PENALTIES, messages=CHAT),
    generation(GREEDY, text="def f(x):", num_draft_tokens=0),
]
CHECKS = [
    [health_pb2.HealthCheckRequest()],
    [health_pb2.HealthCheckRequest(service="specwire.v1.VerifyService")],
]
CONVERSATIONS: dict[str, Sequence[Sequence[Message]]] = {
    "Generate": GENERATIONS,
    "Draft": [drafted(*pair) for pair in PAIRS],
    "Verify": [verified(*pair) for pair in PAIRS],
    "Check": CHECKS,
    "Watch": CHECKS,
}


def method_of(service: str, descriptor: MethodDescriptor) -> Method:
    """Of others than these, one request, from the middle of a tokenizer if it asks for one."""
    request = GetMessageClass(descriptor.input_type)
    offset = {"offset": 7} if descriptor.name == "GetTokenizer" else {}
    said = CONVERSATIONS.get(descriptor.name, [[request(**offset)]])
    return Method(service, descriptor, said, 1 if descriptor.name == "Watch" else 1000)


SERVED = (
    ("coordinator", generation_pb2.DESCRIPTOR),
    ("draft", draft_pb2.DESCRIPTOR),
    ("verify", verify_pb2.DESCRIPTOR),
    ("verify", health_pb2.DESCRIPTOR),
)
METHODS: Sequence[Method] = [
    method_of(role, method)
    for role, file in SERVED
    for service in file.services_by_name.values()
    for method in service.methods
    if method.name != "List"  # of Health, which is not served
]


# --- mutants of that --------------------------------------------------------------------------------


def encoded(messages: Sequence[Message]) -> list[bytes]:
    return [message.SerializeToString() for message in messages]


EVERYTHING = [data for method in METHODS for requests in method.conversations for data in encoded(requests)]


def with_changed_bytes(method: Method, draws: random.Random) -> list[bytes]:
    requests = encoded(draws.choice(list(method.conversations)))
    place = draws.randrange(len(requests))
    requests[place] = mutated_bytes(requests[place], EVERYTHING, draws)
    return requests


def with_changed_fields(method: Method, draws: random.Random) -> list[bytes]:
    requests = mutated_conversation(draws.choice(list(method.conversations)), draws)
    if not method.is_stream:
        requests = (requests or [method.conversations[0][0]])[:1]
    return encoded(requests)


class Paced:
    """Messages of a call, each sent when those before it are answered: verify takes one request of a sequence
    at a time. What gets no answer, since it is no request, is waited for a moment."""

    PATIENCE_S = 0.05

    def __init__(self, requests: list[bytes], kind: type[Any]) -> None:
        self._requests = requests
        self._kind = kind
        self._answers = threading.Semaphore(0)

    def __iter__(self) -> Iterator[bytes]:
        for data in self._requests:
            yield data
            for _ in range(self._num_asked(data)):
                if not self._answers.acquire(timeout=self.PATIENCE_S):
                    break

    def _num_asked(self, data: bytes) -> int:
        try:
            return len(getattr(self._kind.FromString(data), "sequence_ids", ()))
        except DecodeError:
            return 0

    def answered(self, num: int) -> None:
        if num:
            self._answers.release(num)


class Caller:
    """Says bytes to a method, and tells how that ends."""

    def __init__(self, channel: grpc.Channel, method: Method) -> None:
        ways = ["stream" if way else "unary" for way in (method.is_stream, method.answers_stream)]
        open_call = getattr(channel, "_".join(ways))
        self._call = open_call(method.path, response_deserializer=method.answer.FromString)
        self._method = method

    def status(self, requests: list[bytes]) -> tuple[grpc.StatusCode, str]:
        """Of one call, or INTERNAL if that is what a sequence ended with, and the errors of its sequences.

        OK also when we left because we had heard enough.
        """
        try:
            if not self._method.answers_stream:
                self._call(requests[0], timeout=TIMEOUT_S)
                return grpc.StatusCode.OK, ""
            paced = Paced(requests, type(self._method.conversations[0][0]))
            call = self._call(iter(paced) if self._method.is_stream else requests[0], timeout=TIMEOUT_S)
            errors = list(self._listen(call, paced))
        except grpc.RpcError as error:
            return error.code(), error.details()
        is_defect = any(error.reason == "INTERNAL" for error in errors)
        code = grpc.StatusCode.INTERNAL if is_defect else grpc.StatusCode.OK
        return code, "; ".join(error.message for error in errors)

    def _listen(self, call: Any, paced: Paced) -> Iterator[Any]:
        """The errors of sequences."""
        num_tokens = 0
        for num_answers, answer in enumerate(call, start=1):
            if hasattr(answer, "chunk"):
                num_tokens += len(answer.chunk.tokens)
            if hasattr(answer, "sequence_ids"):
                yield from answer.errors
                paced.answered(len(answer.sequence_ids) + len(answer.errors))
            if num_tokens > MOST_TOKENS or num_answers == self._method.most_answers:
                call.cancel()
                return


def address_of(stack: LocalStack, service: str) -> str:
    addresses = {"coordinator": stack.address, "draft": stack.draft_address, "verify": stack.verify_address}
    return addresses[service]


def defects(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as one. That a client left before its status is grpc's to tell, and none."""
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    return [message for message in errors if not message.startswith("ExecuteBatchError")]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.service + method.path)
def test_unchanged_messages_are_fine(method: Method, stack: LocalStack) -> None:
    with grpc.insecure_channel(address_of(stack, method.service)) as channel:
        caller = Caller(channel, method)
        found = [caller.status(encoded(requests)) for requests in method.conversations]
    assert found == [(grpc.StatusCode.OK, "")] * len(found)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mutate", [with_changed_bytes, with_changed_fields])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.service + method.path)
def test_mutants(
    method: Method,
    mutate: Callable[[Method, random.Random], list[bytes]],
    stack: LocalStack,
    services: dict[str, ModelService],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = stack.client.generate(prompt_token_ids=[3, 4, 5], params=PARAMS)
    seeds = [f"{method.path}/{mutate.__name__}/{i}" for i in range(NUM_MESSAGES)]
    with (
        grpc.insecure_channel(address_of(stack, method.service)) as channel,
        ThreadPoolExecutor(NUM_THREADS) as pool,
    ):
        caller = Caller(channel, method)
        found = list(pool.map(lambda seed: caller.status(mutate(method, random.Random(seed))), seeds))
    odd = [(seed, *status) for seed, status in zip(seeds, found, strict=True) if status[0] not in FINE]
    assert odd == []
    assert defects(caplog) == []
    for service in ("coordinator", "draft", "verify"):
        assert is_serving(address_of(stack, service)), service
    again = stack.client.generate(prompt_token_ids=[3, 4, 5], params=PARAMS)
    assert again.token_ids == expected.token_ids
    assert again.speculation.draft_unavailable == ""
    stack.assert_idle_within(10.0)
    for each in services.values():
        check_integrity(each.runner.pool)
    counts = Counter("errors of sequences" if code is OK and said else code.name for code, said in found)
    shown = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    report.note(f"{NUM_MESSAGES} of {mutate.__name__} to {method.service} {method.path}", "serving", shown)
