"""Streams on credit that a client stops reading."""

from __future__ import annotations

import dataclasses
from typing import Any

from specwire import (
    Rule,
    SamplingParams,
)
from specwire.core import MAX_UNACKNOWLEDGED_TOKENS, MIN_CREDIT_TOKENS
from specwire.rpc.wire import client as client_wire
from specwire.v1 import generation_pb2


def most_ahead(round_len: int) -> int:
    """Tokens that a generation with the SDK's credit may be ahead of its client."""
    return max(MIN_CREDIT_TOKENS, MAX_UNACKNOWLEDGED_TOKENS + round_len)


PROMPT = [1, 2, 3]
TARGET, DRAFT = "emulated:step_ms=1", "emulated:step_ms=0.2,alpha=0.8"
GUMBEL = SamplingParams(seed=7, rule=Rule.GUMBEL)

GenerateRequest = generation_pb2.GenerateRequest


def params(max_tokens: int = 400, **settings: Any) -> SamplingParams:
    return dataclasses.replace(GUMBEL, max_tokens=max_tokens, **settings)


def opening(credit_tokens: int, max_tokens: int = 400, **settings: Any) -> GenerateRequest:
    request = client_wire.generate_request(None, params(max_tokens, **settings), PROMPT)
    request.credit_tokens = credit_tokens
    return request


def received(responses: Any) -> list[int]:
    return [token.id for response in responses for token in response.chunk.tokens]
