"""Messages of draft and verify service to nouns and back, and what all three services share. No I/O.

Incoming messages are checked here and in `wire/client.py`, the only files that know both sides, so that the
rest of the code has only valid nouns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specwire import tree
from specwire.core import (
    MAX_NUM_DRAFT_TOKENS,
    MAX_NUM_OUTCOMES,
    FloatArray,
    IntArray,
    Load,
    Logprobs,
    ModelInfo,
    Preparation,
    Proposal,
    Rule,
    SamplingParams,
    Support,
    Verdict,
)
from specwire.errors import InvalidRequestError
from specwire.v1 import common_pb2, draft_pb2, verify_pb2

RULES = {
    Rule.REJECTION: common_pb2.RULE_REJECTION,
    Rule.BLOCK: common_pb2.RULE_BLOCK,
    Rule.GUMBEL: common_pb2.RULE_GUMBEL,
}
RULE_NAMES = {number: rule for rule, number in RULES.items()}
MAX_TRACEPARENT_LEN = 256

# Padding of a proposal.
_NO_TOKEN = -1
_NO_ID, _NO_PROB = b"\xff\xff\xff\xff", b"\0\0\0\0"
_NO_SUPPORT = Support(np.empty(0, np.int64), np.empty(0, np.float32))

_WARPS = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


# --- arrays ---------------------------------------------------------------------------------------


def ids_to_bytes(token_ids: IntArray) -> bytes:
    """int64 [n] to little-endian uint32."""
    return token_ids.astype("<u4").tobytes()


def ids_from_bytes(data: bytes, name: str) -> IntArray:
    """Little-endian uint32 to int64 [n]."""
    _check_multiple_of_4(data, name)
    return np.frombuffer(data, dtype="<u4").astype(np.int64)


def floats_to_bytes(values: FloatArray) -> bytes:
    """float32 [n] to little-endian float32."""
    return values.astype("<f4", copy=False).tobytes()


def floats_from_bytes(data: bytes, name: str) -> FloatArray:
    """Little-endian float32 to float32 [n]."""
    _check_multiple_of_4(data, name)
    return np.frombuffer(data, dtype="<f4")


def _check_multiple_of_4(data: bytes, name: str) -> None:
    if len(data) % 4:
        raise InvalidRequestError(name, f"{len(data)} bytes", "is not a whole number of 4-byte entries")


# --- sampling parameters --------------------------------------------------------------------------


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """The parameters that determine the distribution of the next token."""
    return common_pb2.SamplingParams(
        **{name: getattr(params, name) for name in (*_WARPS, *_PENALTIES)},
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        rule=RULES[params.rule] if params.rule else common_pb2.RULE_UNSPECIFIED,
        logprobs=params.logprobs,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The same, as arguments of `SamplingParams`; unset fields are left out, except for the rule.

    Raises:
        InvalidRequestError: an unknown rule.
    """
    fields: dict[str, Any] = {name: getattr(message, name) for name in ("top_k", "min_p", *_PENALTIES[1:])}
    for name in ("temperature", "top_p", "repetition_penalty", "seed", "logprobs"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    if message.rule and message.rule not in RULE_NAMES:
        raise InvalidRequestError("rule", message.rule, "is not a rule of this protocol version")
    fields["rule"] = RULE_NAMES.get(message.rule)
    fields["logit_bias"] = dict(message.logit_bias)
    return fields


def checked_traceparent(value: str) -> str:
    """A caller's trace context.

    Raises:
        InvalidRequestError: too long to be one.
    """
    if len(value) > MAX_TRACEPARENT_LEN:
        raise InvalidRequestError("traceparent", f"{len(value)} characters", f"over {MAX_TRACEPARENT_LEN}")
    return value


def opened_params(message: common_pb2.OpenSequence) -> SamplingParams:
    """Parameters of a model-service stream.

    Raises:
        InvalidRequestError: also if seed or rule are unset, which the coordinator chooses.
    """
    if not message.sampling.HasField("seed"):
        raise InvalidRequestError("seed", "unset", "must be set on a stream")
    if message.sampling.rule == common_pb2.RULE_UNSPECIFIED:
        raise InvalidRequestError("rule", "unset", "must be set on a stream")
    return SamplingParams(**sampling_from_proto(message.sampling), cache_salt=message.cache_salt)


def open_sequence(params: SamplingParams, prompt_len: int, vocab_limit: int = 0) -> common_pb2.OpenSequence:
    """The first message of a model-service stream, without its tokens."""
    return common_pb2.OpenSequence(
        sampling=sampling_to_proto(params),
        prompt_len=prompt_len,
        vocab_limit=vocab_limit,
        cache_salt=params.cache_salt,
    )


# --- draft and verify -----------------------------------------------------------------------------


def check_num_draft_tokens(name: str, value: int) -> int:
    """The count itself, if it is within the limit."""
    if not 0 <= value <= MAX_NUM_DRAFT_TOKENS:
        raise InvalidRequestError(name, value, f"must lie in [0, {MAX_NUM_DRAFT_TOKENS}]")
    return value


def preparation_to_proto(preparation: Preparation) -> draft_pb2.Preparation:
    """Field by field."""
    return draft_pb2.Preparation(
        num_outcomes=preparation.num_outcomes,
        num_draft_tokens=preparation.num_draft_tokens,
        max_depth=preparation.max_depth,
    )


def preparation_from_proto(message: draft_pb2.Preparation) -> Preparation:
    """Field by field; refuses numbers out of range."""
    limits = {"num_outcomes": MAX_NUM_OUTCOMES, "num_draft_tokens": MAX_NUM_DRAFT_TOKENS}
    for name, limit in limits.items():
        if not 1 <= getattr(message, name) <= limit:
            raise InvalidRequestError(f"prepare.{name}", getattr(message, name), f"must lie in [1, {limit}]")
    max_depth = check_num_draft_tokens("prepare.max_depth", message.max_depth)
    return Preparation(message.num_outcomes, message.num_draft_tokens, max_depth)


def proposal_to_proto(
    proposal: Proposal, path: Sequence[int] = (), *, num_tokens: int = 0, support_len: int = 0
) -> draft_pb2.Proposal:
    """A chain with its supports or a tree, and the outcome that it was prepared for.

    Args:
        num_tokens, support_len: tokens and entries of each support that a proposal with supports is padded
            to, so that its size does not depend on its tokens.
    """
    supports = [_support_to_proto(support, support_len) for support in proposal.supports]
    token_ids = list(proposal.token_ids)
    if supports:
        num_missing = max(0, num_tokens - len(token_ids))
        token_ids += [_NO_TOKEN] * num_missing
        supports += [_support_to_proto(_NO_SUPPORT, support_len)] * num_missing
    return draft_pb2.Proposal(
        token_ids=token_ids, parent_indices=proposal.parents, prefix_token_ids=path, supports=supports
    )


def _support_to_proto(support: Support, length: int) -> draft_pb2.Support:
    num_missing = max(0, length - len(support.token_ids))
    return draft_pb2.Support(
        token_ids=ids_to_bytes(support.token_ids) + _NO_ID * num_missing,
        probs=floats_to_bytes(support.probs) + _NO_PROB * num_missing,
    )


def proposal_from_proto(message: draft_pb2.Proposal, base_len: int) -> Proposal:
    """A chain with its supports, or a tree.

    Raises:
        InvalidRequestError: supports whose number or lengths do not match the token ids; parents that are no
            tree, or one with supports.
    """
    token_ids = list(message.token_ids)
    parents = tree.checked_parents(message.parent_indices, len(token_ids))
    if parents and message.supports:
        raise InvalidRequestError("supports", len(message.supports), "must be none in a tree")
    num_tokens = token_ids.index(_NO_TOKEN) if _NO_TOKEN in token_ids else len(token_ids)
    if message.supports and len(message.supports) != len(token_ids):
        raise InvalidRequestError("supports", len(message.supports), "must be one for each draft token")
    supports = [_support_from_proto(support) for support in message.supports[:num_tokens]]
    return Proposal(base_len, token_ids[:num_tokens], supports, parents=parents)


def _support_from_proto(message: draft_pb2.Support) -> Support:
    token_ids = ids_from_bytes(message.token_ids, "supports.token_ids")
    probs = floats_from_bytes(message.probs, "supports.probs")
    if len(token_ids) != len(probs):
        raise InvalidRequestError("supports.probs", len(probs), "must be one for each token id")
    length = int(np.count_nonzero(probs))
    return Support(token_ids[:length], probs[:length])


def verdict_to_proto(verdict: Verdict) -> verify_pb2.VerifyResponse:
    """A verdict; the caller fills in request id, incarnation and timings."""
    return verify_pb2.VerifyResponse(
        base_len=verdict.base_len,
        target_token_ids=verdict.target_token_ids,
        target_probs=[floats_to_bytes(probs) for probs in verdict.target_probs],
        tail_mass=verdict.tail_mass,
        logprobs=[_logprobs_to_proto(entry) for entry in verdict.logprobs],
    )


def verdict_from_proto(message: verify_pb2.VerifyResponse) -> Verdict:
    """The verdict of a response."""
    return Verdict(
        message.base_len,
        list(message.target_token_ids),
        [floats_from_bytes(probs, "target_probs") for probs in message.target_probs],
        list(message.tail_mass),
        [_logprobs_from_proto(entry) for entry in message.logprobs],
    )


def load_to_proto(load: Load) -> common_pb2.Load:
    """The load that a response reports."""
    return common_pb2.Load(
        num_waiting=load.num_waiting,
        num_sequences=load.num_sequences,
        base_ns=load.base_ns,
        sequence_ns=load.sequence_ns,
        token_ns=load.token_ns,
    )


def load_from_proto(message: common_pb2.Load) -> Load:
    """The load of a response."""
    return Load(
        message.num_waiting,
        max(1, message.num_sequences),
        message.base_ns,
        message.sequence_ns,
        message.token_ns,
    )


def _logprobs_to_proto(entry: Logprobs) -> verify_pb2.PositionLogprobs:
    return verify_pb2.PositionLogprobs(
        token_ids=ids_to_bytes(entry.token_ids), values=floats_to_bytes(entry.values), num_top=entry.num_top
    )


def _logprobs_from_proto(message: verify_pb2.PositionLogprobs) -> Logprobs:
    return Logprobs(
        ids_from_bytes(message.token_ids, "logprobs.token_ids"),
        floats_from_bytes(message.values, "logprobs.values"),
        message.num_top,
    )


_CAPABILITIES = {
    "prepares_outcomes": common_pb2.CAPABILITY_PREPARED_OUTCOMES,
    "batch_invariant": common_pb2.CAPABILITY_BATCH_INVARIANT,
    "trees": common_pb2.CAPABILITY_TREES,
}
_MODEL_INFO = [name for name in ModelInfo.__dataclass_fields__ if name not in _CAPABILITIES]


def model_info_to_proto(info: ModelInfo) -> common_pb2.ModelInfo:
    """Field by field: the noun has the message's names, capabilities apart."""
    fields = {name: getattr(info, name) for name in _MODEL_INFO}
    capabilities = [number for name, number in _CAPABILITIES.items() if getattr(info, name)]
    return common_pb2.ModelInfo(**fields, capabilities=capabilities)


def model_info_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    """Field by field: the noun has the message's names, capabilities apart."""
    fields = {name: getattr(message, name) for name in _MODEL_INFO}
    fields |= {name: number in message.capabilities for name, number in _CAPABILITIES.items()}
    return ModelInfo(**fields | {"eos_token_ids": tuple(message.eos_token_ids)})
