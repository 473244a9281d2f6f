"""What must be refused is refused with a typed error that names field and value; others are unaffected.

Messages of the model services are built by hand here, past everything the client and the coordinator check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from specwire import (
    Completion,
    ContextLengthError,
    InvalidRequestError,
    PrefixMismatchError,
    Rule,
    SamplingParams,
    SpecwireError,
    UnsupportedError,
)
from specwire.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)
from specwire.wire.model import ids_to_bytes
from tests.support import texts
from tests.support.harness import LocalStack, local_stack
from tests.support.refusals import our_errors, refused

PROMPT = "The quick brown"
# Gumbel: its text is fixed by the seed alone. Under rejection sampling the company in a batch may change the
# last bits of a probability, and with them the order of equally likely tokens.
LONG = SamplingParams(max_tokens=1200, ignore_eos=True, seed=11, rule=Rule.GUMBEL)
OUTSIDE = texts.VOCAB_SIZE
MAX_MESSAGE_BYTES = 200_000


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    with local_stack(*pair, coordinator_options={"max_message_bytes": MAX_MESSAGE_BYTES}) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def bystander(stack: LocalStack) -> Iterator[None]:
    """A generation runs all the while; it must say what it says alone."""
    alone = stack.client.generate(PROMPT, LONG)
    ended = threading.Event()

    def run() -> tuple[int, list[Completion]]:
        count, odd = 0, []
        while not ended.is_set() or not count:
            done = stack.client.generate(PROMPT, LONG)
            count += 1
            if done.token_ids != alone.token_ids or done.speculation.draft_unavailable:
                odd.append(done)
        return count, odd

    with ThreadPoolExecutor() as pool:
        running = pool.submit(run)
        yield
        ended.set()
        count, odd = running.result(60)
    assert count
    assert odd == []
    stack.assert_idle_within(1.0)


class TestParameters:
    """Refused by the noun itself, before anything is sent."""

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.1),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("temperature", "hot"),
            ("top_p", 0.0),
            ("top_p", 1.01),
            ("top_p", float("nan")),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("top_k", -1),
            ("top_k", 2.5),
            ("top_k", 2**31),
            ("rule", "tree"),
            ("num_draft_tokens", 65),
            ("num_draft_tokens", -1),
            ("draft", ""),
            ("draft", 3),
            ("max_tokens", 0),
            ("max_tokens", True),
            ("max_tokens", 2**31),
            ("seed", -1),
            ("seed", 2**63),
            ("logprobs", 21),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", 1e-39),
            ("presence_penalty", 2.5),
            ("frequency_penalty", float("-inf")),
            ("stop", ""),
            ("stop_token_ids", [-4]),
            ("stop_token_ids", [2**31]),
        ],
    )
    def test_field_and_value_are_named(self, field: str, value: Any) -> None:
        shown = value[0] if isinstance(value, list) else value
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert caught.value.value in (str(shown), repr(shown))

    def test_bias_names_its_token(self) -> None:
        with refused(InvalidRequestError, "logit_bias[7]=101.0", "[-100, 100]"):
            SamplingParams(logit_bias={7: 101.0})
        with refused(InvalidRequestError, "logit_bias[2147483648]", "must be keyed by token ids"):
            SamplingParams(logit_bias={2**31: 1.0})


class TestRequests:
    """Refused by the coordinator."""

    @pytest.mark.parametrize(
        ("prompt", "params", "parts"),
        [
            ([3, OUTSIDE], {}, (f"prompt_token_ids[1]={OUTSIDE}", f"vocabulary of {OUTSIDE}")),
            ([3, -1], {}, ("prompt_token_ids[1]=-1",)),
            ([3, 2**31], {}, (f"prompt_token_ids[1]={2**31}",)),
            ([], {}, ("prompt=empty", "at least one token")),
            ("", {}, ("prompt=empty", "at least one token")),
            ("x", {"stop_token_ids": (5, OUTSIDE)}, (f"stop_token_ids[1]={OUTSIDE}", "vocabulary")),
            ("x", {"logit_bias": {OUTSIDE: 1.0}}, (f"logit_bias[{OUTSIDE}]={OUTSIDE}", "vocabulary")),
        ],
    )
    def test_named(self, stack: LocalStack, prompt: Any, params: Any, parts: tuple[str, ...]) -> None:
        form = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        with refused(InvalidRequestError, *parts):
            stack.client.generate(**form, params=SamplingParams(**params))

    @pytest.mark.parametrize("forms", [{}, {"prompt": "x", "prompt_token_ids": [3]}])
    def test_exactly_one_prompt(self, stack: LocalStack, forms: dict[str, Any]) -> None:
        with refused(InvalidRequestError, f"prompt={len(forms)}", "exactly one"):
            stack.client.generate(**forms)

    def test_over_the_context(self, stack: LocalStack) -> None:
        room = texts.CONTEXT_LEN - 3
        with refused(ContextLengthError, f"max_tokens={room + 1}", "3 tokens", str(texts.CONTEXT_LEN)):
            stack.client.generate(prompt_token_ids=[3, 4, 5], params=SamplingParams(max_tokens=room + 1))
        params = SamplingParams(max_tokens=room, stop_token_ids=tuple(range(texts.VOCAB_SIZE)))
        assert len(stack.client.generate(prompt_token_ids=[3, 4, 5], params=params).token_ids) == 1

    def test_over_the_message_limit(self, stack: LocalStack) -> None:
        with refused(InvalidRequestError, "prompt=", "bytes", "message size limit"):
            stack.client.generate("x" * (MAX_MESSAGE_BYTES + 1))


class TestRawRequests:
    """Past the client's checks: the coordinator repeats them."""

    @pytest.mark.parametrize(
        ("sampling", "name"),
        [
            ({"temperature": -1.0}, "temperature=-1.0"),
            ({"temperature": float("nan")}, "temperature=nan"),
            ({"top_p": 0.0}, "top_p=0.0"),
            ({"top_k": -2}, "top_k=-2"),
            ({"seed": -3}, "seed=-3"),
            ({"rule": 9}, "rule=9"),
            ({"logprobs": 99}, "logprobs=99"),
            ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
            ({"repetition_penalty": 1e-39}, "repetition_penalty=1e-39"),
            ({"logit_bias": {-1: 1.0}}, "logit_bias[-1]"),
        ],
    )
    def test_sampling(self, stack: LocalStack, sampling: dict[str, Any], name: str) -> None:
        request = generation_pb2.GenerateRequest(text="x", sampling=common_pb2.SamplingParams(**sampling))
        with refused(InvalidRequestError, name):
            self.generate(stack, request)

    @pytest.mark.parametrize(
        ("fields", "name"),
        [
            ({}, "prompt=unset"),
            ({"token_ids": generation_pb2.TokenIds()}, "prompt=empty"),
            ({"messages": generation_pb2.Messages()}, "messages="),
            ({"token_ids": generation_pb2.TokenIds(ids=[-5])}, "prompt_token_ids[0]=-5"),
            ({"text": "x", "num_draft_tokens": 65}, "num_draft_tokens=65"),
            ({"text": "x", "stop_conditions": {"max_tokens": -1}}, "max_tokens=-1"),
            ({"text": "x", "stop_conditions": {"stop": [""]}}, "stop="),
            ({"text": "x", "stop_conditions": {"stop_token_ids": [-1]}}, "stop_token_ids=-1"),
        ],
    )
    def test_request(self, stack: LocalStack, fields: dict[str, Any], name: str) -> None:
        with refused(InvalidRequestError, name):
            self.generate(stack, generation_pb2.GenerateRequest(**fields))

    @staticmethod
    def generate(stack: LocalStack, request: generation_pb2.GenerateRequest) -> None:
        with grpc.insecure_channel(stack.address) as channel, our_errors():
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            list(stub.Generate(iter([request]), timeout=30))


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    """Valid unless told otherwise."""
    return common_pb2.SamplingParams(**{"seed": 1, "rule": common_pb2.RULE_REJECTION} | fields)


def opening(**fields: Any) -> common_pb2.OpenSequence:
    valid: dict[str, Any] = {"sampling": sampling(), "prompt_len": 3}
    return common_pb2.OpenSequence(**valid | fields)


def draft(**fields: Any) -> draft_pb2.DraftRequest:
    valid: dict[str, Any] = {"token_ids": [3, 4, 5], "num_draft_tokens": 2}
    return draft_pb2.DraftRequest(**valid | fields)


def verify(**fields: Any) -> verify_pb2.VerifyRequest:
    """Two draft tokens with supports of two."""
    support = ids_to_bytes(np.array([6, 7]))
    valid: dict[str, Any] = {"token_ids": [3, 4, 5], "draft_token_ids": [6, 7]}
    valid["support_token_ids"] = [support, support]
    return verify_pb2.VerifyRequest(**valid | fields)


def exchange(stack: LocalStack, requests: list[Any]) -> list[Any]:
    """All answers on one stream, each request sent after the answer to the one before."""
    drafting = isinstance(requests[0], draft_pb2.DraftRequest)
    with grpc.insecure_channel(stack.draft_address if drafting else stack.verify_address) as channel:
        answered = threading.Semaphore()

        def in_turn() -> Iterator[Any]:
            for request in requests:
                answered.acquire()
                yield request

        if drafting:
            answers = draft_pb2_grpc.DraftServiceStub(channel).Draft(in_turn(), timeout=30)
        else:
            answers = verify_pb2_grpc.VerifyServiceStub(channel).Verify(in_turn(), timeout=30)
        got = []
        try:
            with our_errors():
                for answer in answers:
                    got.append(answer)
                    answered.release()
        finally:
            answered.release()
    return got


Make = Callable[..., Any]


@pytest.mark.parametrize("make", [draft, verify])
class TestRawStreams:
    """Past the coordinator's checks: the model services repeat what concerns them."""

    def test_the_valid_message_works(self, stack: LocalStack, make: Make) -> None:
        answers = exchange(stack, [make(open=opening(), request_id=4), make(request_id=5)])
        assert [(answer.request_id, answer.base_len) for answer in answers] == [(4, 3), (5, 3)]

    @pytest.mark.parametrize(
        ("sampling", "name"),
        [
            (common_pb2.SamplingParams(rule=common_pb2.RULE_GUMBEL), "seed=unset"),
            (common_pb2.SamplingParams(seed=1), "rule=unset"),
            (sampling(rule=7), "rule=7"),
            (sampling(temperature=-1.0), "temperature=-1.0"),
            (sampling(temperature=float("nan")), "temperature=nan"),
            (sampling(top_p=0.0), "top_p=0.0"),
            (sampling(seed=-1), "seed=-1"),
            (sampling(logit_bias={400: 1.0}), "logit_bias[400]"),
        ],
    )
    def test_sampling(
        self, stack: LocalStack, make: Make, sampling: common_pb2.SamplingParams, name: str
    ) -> None:
        with refused(InvalidRequestError, name):
            exchange(stack, [make(open=opening(sampling=sampling))])

    @pytest.mark.parametrize(
        ("fields", "parts"),
        [
            ({"open": opening(prompt_len=0)}, ("prompt_len=0",)),
            ({"open": None}, ("open=unset", "first request")),
            ({"base_len": -1}, ("base_len=-1",)),
            ({"token_ids": []}, ("token_ids=[]", "at least one token")),
            ({"token_ids": [3, 400]}, ("token_ids[1]=400", "vocabulary")),
            ({"token_ids": [-3]}, ("token_ids[0]=-3", "vocabulary")),
        ],
    )
    def test_first_message(
        self, stack: LocalStack, make: Make, fields: dict[str, Any], parts: tuple[str, ...]
    ) -> None:
        with refused(InvalidRequestError, *parts):
            exchange(stack, [make(**{"open": opening()} | fields)])

    def test_over_the_context(self, stack: LocalStack, make: Make) -> None:
        with refused(ContextLengthError, str(texts.CONTEXT_LEN + 1), f"context of {texts.CONTEXT_LEN}"):
            exchange(stack, [make(open=opening(), token_ids=[3] * (texts.CONTEXT_LEN - 1))])

    def test_a_second_open(self, stack: LocalStack, make: Make) -> None:
        with refused(InvalidRequestError, "open=set", "only the first request"):
            exchange(stack, [make(open=opening()), make(open=opening())])

    def test_a_base_beyond_what_is_held(self, stack: LocalStack, make: Make) -> None:
        with refused(PrefixMismatchError, "base_len=1 ", "0 tokens held"):
            exchange(stack, [make(open=opening(), base_len=1)])
        with pytest.raises(PrefixMismatchError) as caught:
            exchange(stack, [make(open=opening()), make(base_len=6)])
        assert (caught.value.base_len, caught.value.held_len) == (6, 5)

    def test_the_status_on_the_wire_is_the_documented_one(self, stack: LocalStack, make: Make) -> None:
        with grpc.insecure_channel(stack.draft_address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Draft(iter([draft(open=opening(), base_len=9)]), timeout=30))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


class TestRawDraft:
    @pytest.mark.parametrize("count", [-1, 65])
    def test_number_of_draft_tokens(self, stack: LocalStack, count: int) -> None:
        with refused(InvalidRequestError, f"num_draft_tokens={count}", "[0, 64]"):
            exchange(stack, [draft(open=opening(), num_draft_tokens=count)])

    def test_none_just_commits(self, stack: LocalStack) -> None:
        (answer,) = exchange(stack, [draft(open=opening(), num_draft_tokens=0)])
        assert (answer.base_len, len(answer.proposals)) == (3, 0)


class TestRawVerify:
    @pytest.mark.parametrize(
        ("fields", "error", "parts"),
        [
            ({"draft_token_ids": [6, OUTSIDE]}, InvalidRequestError, (f"draft_token_ids[1]={OUTSIDE}",)),
            ({"draft_token_ids": [6, -1]}, InvalidRequestError, ("draft_token_ids[1]=-1",)),
            ({"draft_token_ids": [6] * 65}, InvalidRequestError, ("draft_token_ids=65",)),
            (
                {"parent_indices": [-1, -1]},
                UnsupportedError,
                ("parent_indices=[-1, -1]", "rule"),
            ),
            ({"parent_indices": [0, -1]}, InvalidRequestError, ("parent_indices[0]=0",)),
            ({"parent_indices": [-1]}, InvalidRequestError, ("parent_indices=1", "must be none or 2")),
            ({"support_token_ids": []}, InvalidRequestError, ("support_token_ids=0", "must be 2")),
            ({"support_token_ids": [b"", b"", b""]}, InvalidRequestError, ("support_token_ids=3",)),
            ({"support_token_ids": [b"abc", b""]}, InvalidRequestError, ("support_token_ids[0]", "4-byte")),
            (
                {"support_token_ids": [b"", ids_to_bytes(np.array([6, OUTSIDE]))]},
                InvalidRequestError,
                (f"support_token_ids[1]={OUTSIDE}", "vocabulary"),
            ),
            (
                {"support_token_ids": [ids_to_bytes(np.array([6, 8, 6])), b""]},
                InvalidRequestError,
                ("support_token_ids[0]=", "twice"),
            ),
        ],
    )
    def test_refused(
        self, stack: LocalStack, fields: dict[str, Any], error: type[SpecwireError], parts: tuple[str, ...]
    ) -> None:
        with refused(error, *parts):
            exchange(stack, [verify(open=opening(), **fields)])

    def test_supports_where_tokens_are_matched(self, stack: LocalStack) -> None:
        with refused(InvalidRequestError, "support_token_ids=2", "must be 0"):
            exchange(stack, [verify(open=opening(sampling=sampling(temperature=0.0)))])

    def test_a_chain_spelt_out_is_a_chain(self, stack: LocalStack) -> None:
        (answer,) = exchange(stack, [verify(open=opening(), parent_indices=[-1, 0])])
        assert len(answer.target_token_ids) == 3
