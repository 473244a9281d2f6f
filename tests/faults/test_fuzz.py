"""Mutated messages on every method: no process crashes, no status is INTERNAL, others are served."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire import Rule, SamplingParams
from specwire.engine.boot import ModelService
from tests.support import report
from tests.support.conversations import METHODS, MOST_TOKENS, Method
from tests.support.effort import sized
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.mutations import mutated_bytes, mutated_conversation

NUM_MESSAGES = sized(100, 5_000)  # of each kind, for each method
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
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(sized(300, 1800))]
services = entered(started_services)


@pytest.fixture(scope="module")
def stack(services: dict[str, ModelService], pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    with local_stack(*pair) as running:
        yield running


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


def assert_serving(stack: LocalStack) -> None:
    for service in ("coordinator", "draft", "verify"):
        with grpc.insecure_channel(address_of(stack, service)) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, service


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
    assert_serving(stack)
    again = stack.client.generate(prompt_token_ids=[3, 4, 5], params=PARAMS)
    assert again.token_ids == expected.token_ids
    assert again.speculation.draft_unavailable == ""
    stack.assert_idle_within(10.0)
    for service in services.values():
        check_integrity(service.runner.pool)
    counts = Counter("errors of sequences" if code is OK and said else code.name for code, said in found)
    shown = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    report.note(f"{NUM_MESSAGES} of {mutate.__name__} to {method.service} {method.path}", "serving", shown)
