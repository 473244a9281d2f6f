"""Every method that the three services serve, and what is said on it when nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from specwire.core import Preparation, Proposal
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import VerifyOrder
from specwire.support import Support
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from tests.support.model_streams import draft, opening, sampling, verify

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


GUMBEL = sampling(rule=common_pb2.RULE_GUMBEL)
REJECTION = sampling(rule=common_pb2.RULE_REJECTION, temperature=0.8, top_p=0.9, min_p=0.01, logprobs=2)
PENALTIES = sampling(
    rule=common_pb2.RULE_GUMBEL, top_k=5, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={7: 2.0}
)
GREEDY = sampling(rule=common_pb2.RULE_REJECTION, temperature=0.0, frequency_penalty=-0.5)
PAIRS = ((GUMBEL, REJECTION), (REJECTION, GREEDY), (PENALTIES, GUMBEL), (GREEDY, REJECTION))
_SUPPORT = Support(np.array([6, 7, 9]), np.array([0.5, 0.25, 0.25], np.float32))
_TRACED = f"00-{'1' * 32}-{'2' * 16}-01"


def _verify(first: common_pb2.SamplingParams, other: common_pb2.SamplingParams) -> list[Message]:
    """Two sequences; what the second one commits is one request behind the first one."""

    def judged(sampling: common_pb2.SamplingParams) -> dict[str, Any]:
        supports = [_SUPPORT, _SUPPORT] if sampling is REJECTION else []
        return {"proposal": Proposal(0, [6, 7], supports)}

    begun, order = [opening(1, sampling=first), opening(2, sampling=other)], VerifyOrder
    return [
        verify(order(1, 1, 0, [3, 4, 5], **judged(first)), opened=begun[:1]),
        verify(
            order(1, 2, 4, [9], **judged(first), traceparent=_TRACED),
            order(2, 1, 0, [3, 4], **judged(other)),
            opened=begun[1:],
        ),
        verify(order(1, 3, 5, [10, 11]), order(2, 2, 3, [12], **judged(other))),
        verify(order(2, 3, 4, [13]), closed=[1]),
    ]


def _draft(first: common_pb2.SamplingParams, other: common_pb2.SamplingParams) -> list[Message]:
    """As `_verify`."""
    ahead, order = Preparation(4, 3), DraftOrder
    begun = [opening(1, sampling=first), opening(2, sampling=other)]
    return [
        draft(order(1, 1, 0, [3, 4, 5], 3, prepare=ahead), opened=begun[:1]),
        draft(order(1, 2, 4, [9], 2), order(2, 1, 0, [3, 4], 2, prepare=ahead), opened=begun[1:]),
        draft(order(1, 3, 5, [10, 11], 0, prepare=ahead), order(2, 2, 3, [12], 0)),
        draft(order(2, 3, 4, [13], 1), closed=[1]),
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
        "/specwire.v1.GenerationService/GetTokenizer",
        generation_pb2.GetTokenizerRequest(offset=7),
        generation_pb2.GetTokenizerResponse,
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
        [_draft(*pair) for pair in PAIRS],
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
        [_verify(*pair) for pair in PAIRS],
        verify_pb2.VerifyResponse,
        answers_stream=True,
    ),
    _unary(
        "verify",
        "/specwire.v1.VerifyService/GetModelInfo",
        verify_pb2.VerifyServiceGetModelInfoRequest(),
        verify_pb2.VerifyServiceGetModelInfoResponse,
    ),
    _unary(
        "verify",
        "/specwire.v1.VerifyService/GetTokenizer",
        verify_pb2.VerifyServiceGetTokenizerRequest(offset=7),
        verify_pb2.VerifyServiceGetTokenizerResponse,
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
