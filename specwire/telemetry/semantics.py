"""Names of spans and attributes: OpenTelemetry's conventions, and specwire's own.

The conventions are those of today: RPC and HTTP as of 1.45, `gen_ai` from the repository that it moved to.
Lengths are in tokens, sizes in bytes, `batch_size` in sequences.
"""

from __future__ import annotations

from typing import Final

GENERATE: Final = "generate"
"""Name of the span that is a whole generation."""

# --- generative AI

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
"""`chat` (`OPERATION_CHAT`) for messages, else `text_completion` (`OPERATION_TEXT_COMPLETION`)."""
OPERATION_CHAT: Final = "chat"
OPERATION_TEXT_COMPLETION: Final = "text_completion"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
"""`PROVIDER`: the convention's list has providers of models only, and allows others."""
PROVIDER: Final = "specwire"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
"""Only if the request has one: a seed that was drawn for it is not shown as requested."""
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
"""Seconds from the request to the first chunk."""
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
"""Those of the prompt that were in the cache; they count as input tokens as well."""
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

# --- calls

ERROR_TYPE: Final = "error.type"
"""A gRPC status name, an HTTP status, or the class of an exception."""
RPC_SYSTEM_NAME: Final = "rpc.system.name"
"""`GRPC`; was `rpc.system`."""
GRPC: Final = "grpc"
RPC_METHOD: Final = "rpc.method"
"""`package.Service/Method`, which contains what was `rpc.service`."""
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"
"""Name of the status (`OK`, `DEADLINE_EXCEEDED`); was `rpc.grpc.status_code`, a number."""
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
CLIENT_ADDRESS: Final = "client.address"
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
HTTP_ROUTE: Final = "http.route"
NETWORK_PROTOCOL_VERSION: Final = "network.protocol.version"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
USER_AGENT_ORIGINAL: Final = "user_agent.original"

# --- specwire

BASE_LEN: Final = "specwire.base_len"
AHEAD_MS: Final = "specwire.ahead_ms"
"""What the draft computed before it was asked, while other stages ran."""
BATCH_SIZE: Final = "specwire.batch_size"
"""Of the last forward pass."""
DRAFT_AVAILABLE: Final = "specwire.draft.available"
"""False if the draft could not be used for a part of the generation."""
AWAITED: Final = "specwire.awaited"
CALL_OUTCOME: Final = "specwire.outcome"
"""Of a call to a model service: ready, begun, asked, timed_out, unavailable, lost."""
DRAFT_PREPARED: Final = "specwire.draft.prepared"
"""Whether the proposal was ready before it was requested."""
FORWARD_MS: Final = "specwire.forward_ms"
"""Passes of a request at its service, since it arrived."""
HANDLING_MS: Final = "specwire.handling_ms"
"""What passes and waits for them leave of a request's time at its service."""
NETWORK_MS: Final = "specwire.network_ms"
"""What the time at the service leaves of a call."""
NUM_ACCEPTED_TOKENS: Final = "specwire.num_accepted_tokens"
NUM_CACHED_TOKENS: Final = "specwire.num_cached_tokens"
"""Found in the cache of the service instead of being computed."""
NUM_DRAFT_TOKENS: Final = "specwire.num_draft_tokens"
NUM_OUTCOMES: Final = "specwire.num_outcomes"
NUM_PREPARED: Final = "specwire.num_prepared"
NUM_ROUNDS: Final = "specwire.num_rounds"
QUEUE_MS: Final = "specwire.queue_ms"
"""Waits of a request for passes of others, before and between its own."""
REQUEST_BYTES: Final = "specwire.request_bytes"
REQUEST_ID: Final = "specwire.request_id"
"""The caller's `x-request-id`, or the one that the HTTP front gave."""
RESPONSE_BYTES: Final = "specwire.response_bytes"
ROUND: Final = "specwire.round"
"""From 0."""
RULE: Final = "specwire.rule"
SOURCE: Final = "specwire.source"
"""What made a round's proposal: a model's name, or a method such as `ngram`; absent without draft tokens."""


def server(address: str) -> dict[str, str | int]:
    """The attributes of a span about what is called at HOST:PORT."""
    host, _, port = address.rpartition(":")
    named: dict[str, str | int] = {SERVER_ADDRESS: host.strip("[]")}
    return named | ({SERVER_PORT: int(port)} if port.isdecimal() else {})


def stage_attribute(stage: str) -> str:
    """Name of the attribute with the time that a generation spent in this stage of its ledger."""
    return f"specwire.stage.{stage}_ms"
