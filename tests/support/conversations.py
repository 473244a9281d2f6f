"""Every method that the three services serve, and what is said on it when nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from specwire.wire.model import ids_to_bytes

MOST_TOKENS = 15
"""Of a generation; one that got so many may wait for an acknowledgement, which a mutant does not send."""


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        service: role of the service that has it.
        conversations: requests of a call, each a list.
        answer: type of what comes back.
        most_answers: after which the caller leaves.
    """

    service: str
    path: str
    is_stream: bool
    conversations: Sequence[Sequence[Message]]
    answer: Any
    answers_stream: bool = False
    most_answers: int = 1000


def _sampling(rule: common_pb2.Rule, **fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(seed=7, rule=rule, **fields)


def _opening(sampling: common_pb2.SamplingParams) -> common_pb2.OpenSequence:
    return common_pb2.OpenSequence(sampling=sampling, prompt_len=3)


GUMBEL = _sampling(common_pb2.RULE_GUMBEL)
REJECTION = _sampling(common_pb2.RULE_REJECTION, temperature=0.8, top_p=0.9, min_p=0.01, logprobs=2)
PENALTIES = _sampling(
    common_pb2.RULE_GUMBEL, top_k=5, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={7: 2.0}
)
GREEDY = _sampling(common_pb2.RULE_REJECTION, temperature=0.0, frequency_penalty=-0.5)
SAMPLINGS = (GUMBEL, REJECTION, PENALTIES, GREEDY)
_SUPPORT = ids_to_bytes(np.array([6, 7, 9]))


def _matches(sampling: common_pb2.SamplingParams) -> bool:
    return sampling is not REJECTION


def _verify(sampling: common_pb2.SamplingParams) -> list[Message]:
    supports = [] if _matches(sampling) else [_SUPPORT, _SUPPORT]
    drafts: dict[str, Any] = {"draft_token_ids": [6, 7], "support_token_ids": supports}
    request = verify_pb2.VerifyRequest
    return [
        request(open=_opening(sampling), request_id=1, token_ids=[3, 4, 5], **drafts),
        request(
            request_id=2, base_len=4, token_ids=[9], traceparent=f"00-{'1' * 32}-{'2' * 16}-01", **drafts
        ),
        request(request_id=3, base_len=5, token_ids=[10, 11]),
    ]


def _draft(sampling: common_pb2.SamplingParams) -> list[Message]:
    request = draft_pb2.DraftRequest
    ahead = draft_pb2.Preparation(num_outcomes=4, num_draft_tokens=3)
    return [
        request(
            open=_opening(sampling), request_id=1, token_ids=[3, 4, 5], num_draft_tokens=3, prepare=ahead
        ),
        request(request_id=2, base_len=4, token_ids=[9], num_draft_tokens=2),
        request(request_id=3, base_len=5, token_ids=[10, 11], prepare=ahead),
    ]


def _generate(sampling: common_pb2.SamplingParams, **prompt: Any) -> list[Message]:
    request = generation_pb2.GenerateRequest
    stops = generation_pb2.StopConditions(max_tokens=8, stop=["fox"], stop_token_ids=[2], ignore_eos=True)
    first = request(sampling=sampling, stop_conditions=stops, credit_tokens=64, **prompt)
    return [first, request(credit_tokens=5), request(credit_tokens=3)]


_CHAT = generation_pb2.Messages(messages=[generation_pb2.Message(role="user", content="Hello, hello world!")])
_GENERATE = [
    _generate(GUMBEL, token_ids=generation_pb2.TokenIds(ids=[3, 4, 5])),
    _generate(REJECTION, text="The quick brown", num_draft_tokens=2),
    _generate(PENALTIES, messages=_CHAT),
    _generate(GREEDY, text="def f(x):", num_draft_tokens=0),
]
_CHECK = [
    [health_pb2.HealthCheckRequest()],
    [health_pb2.HealthCheckRequest(service="specwire.v1.VerifyService")],
]


def _unary(service: str, path: str, request: Message, answer: Any) -> Method:
    return Method(service, path, False, [[request]], answer)


METHODS: Sequence[Method] = (
    Method(
        "coordinator",
        "/specwire.v1.GenerationService/Generate",
        True,
        _GENERATE,
        generation_pb2.GenerateResponse,
        answers_stream=True,
    ),
    _unary(
        "coordinator",
        "/specwire.v1.GenerationService/GetModelInfo",
        generation_pb2.GetModelInfoRequest(),
        generation_pb2.GetModelInfoResponse,
    ),
    _unary(
        "coordinator",
        "/specwire.v1.GenerationService/GetStatus",
        generation_pb2.GetStatusRequest(),
        generation_pb2.GetStatusResponse,
    ),
    Method(
        "draft",
        "/specwire.v1.DraftService/Draft",
        True,
        [_draft(sampling) for sampling in SAMPLINGS],
        draft_pb2.DraftResponse,
        answers_stream=True,
    ),
    _unary(
        "draft",
        "/specwire.v1.DraftService/GetModelInfo",
        draft_pb2.DraftServiceGetModelInfoRequest(),
        draft_pb2.DraftServiceGetModelInfoResponse,
    ),
    Method(
        "verify",
        "/specwire.v1.VerifyService/Verify",
        True,
        [_verify(sampling) for sampling in SAMPLINGS],
        verify_pb2.VerifyResponse,
        answers_stream=True,
    ),
    _unary(
        "verify",
        "/specwire.v1.VerifyService/GetModelInfo",
        verify_pb2.VerifyServiceGetModelInfoRequest(),
        verify_pb2.VerifyServiceGetModelInfoResponse,
    ),
    Method("verify", "/grpc.health.v1.Health/Check", False, _CHECK, health_pb2.HealthCheckResponse),
    Method(
        "verify",
        "/grpc.health.v1.Health/Watch",
        False,
        _CHECK,
        health_pb2.HealthCheckResponse,
        answers_stream=True,
        most_answers=1,
    ),
)
