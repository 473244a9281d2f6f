"""What the span of a generation says about its request and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.requests import CheckedRequest
from specwire.completion import Completion
from specwire.telemetry import semantics as names

Attributes = Mapping[str, Any]

METHOD = "specwire.v1.GenerationService/Generate"
CALL: Attributes = {
    names.RPC_SYSTEM_NAME: names.GRPC,
    names.RPC_METHOD: METHOD,
    names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
}
"""Known when a call arrives."""


def of_request(checked: CheckedRequest, model: str) -> Attributes:
    """Of a request that is valid."""
    params, is_chat = checked.params, checked.message.HasField("messages")
    return {
        names.GEN_AI_OPERATION_NAME: names.OPERATION_CHAT if is_chat else names.OPERATION_TEXT_COMPLETION,
        names.GEN_AI_REQUEST_MODEL: model,
        names.GEN_AI_REQUEST_MAX_TOKENS: params.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: params.temperature,
        names.GEN_AI_REQUEST_TOP_K: params.top_k or None,
        names.GEN_AI_REQUEST_TOP_P: params.top_p,
        names.GEN_AI_REQUEST_FREQUENCY_PENALTY: params.frequency_penalty or None,
        names.GEN_AI_REQUEST_PRESENCE_PENALTY: params.presence_penalty or None,
        names.GEN_AI_REQUEST_SEED: params.seed if checked.message.sampling.HasField("seed") else None,
        names.RULE: params.rule,
    }


def of_generation(done: Completion, *, has_ended: bool) -> Attributes:
    """As far as it came."""
    speculation = done.speculation
    first_ms = done.timing.time_to_first_token_ms
    return {
        names.GEN_AI_RESPONSE_MODEL: done.model,
        names.GEN_AI_RESPONSE_FINISH_REASONS: [done.finish_reason.value] if has_ended else None,
        names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: first_ms / 1e3 if first_ms else None,
        names.GEN_AI_USAGE_INPUT_TOKENS: done.usage.prompt_tokens,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: done.usage.completion_tokens,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: done.usage.cached_tokens,
        names.NUM_ROUNDS: speculation.num_rounds,
        names.NUM_DRAFT_TOKENS: speculation.num_draft_tokens,
        names.NUM_ACCEPTED_TOKENS: speculation.num_accepted_tokens,
        names.NUM_PREPARED: speculation.num_prepared,
        names.DRAFT_AVAILABLE: not speculation.draft_unavailable,
    }
