"""Messages to nouns and back: the only file that knows both. No I/O.

Whatever arrives is checked here, so that the rest of the code holds only valid nouns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specwire import core
from specwire.core import (
    MAX_CREDIT_TOKENS,
    MAX_NUM_DRAFT_TOKENS,
    MAX_NUM_OUTCOMES,
    MIN_CREDIT_TOKENS,
    Fate,
    FinishReason,
    FloatArray,
    IntArray,
    Load,
    Logprobs,
    ModelInfo,
    Preparation,
    Proposal,
    ResumeInfo,
    Rule,
    SamplingParams,
    Support,
    Token,
    Verdict,
)
from specwire.errors import InvalidRequestError, UnsupportedError
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2

_RULES = {Rule.REJECTION: common_pb2.RULE_REJECTION, Rule.GUMBEL: common_pb2.RULE_GUMBEL}
_RULE_NAMES = {number: rule for rule, number in _RULES.items()}
_FATES = {
    Fate.ACCEPTED: generation_pb2.FATE_ACCEPTED,
    Fate.REJECTED: generation_pb2.FATE_REJECTED,
    Fate.RECOVERED: generation_pb2.FATE_RECOVERED,
    Fate.BONUS: generation_pb2.FATE_BONUS,
    Fate.GIVEN: generation_pb2.FATE_GIVEN,
}
_FATE_NAMES = {number: fate for fate, number in _FATES.items()}
_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASON_NAMES = {number: reason for reason, number in _FINISH_REASONS.items()}

MAX_TRACEPARENT_LEN = 256
MAX_MESSAGES = 4096

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
    """The part of the parameters that changes the law of the next token."""
    return common_pb2.SamplingParams(
        **{name: getattr(params, name) for name in (*_WARPS, *_PENALTIES)},
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        rule=_RULES[params.rule] if params.rule else common_pb2.RULE_UNSPECIFIED,
        logprobs=params.logprobs,
    )


def _law(message: common_pb2.SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(message, name) for name in ("top_k", "min_p", *_PENALTIES[1:])}
    for name in ("temperature", "top_p", "repetition_penalty", "seed", "logprobs"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    if message.rule and message.rule not in _RULE_NAMES:
        raise InvalidRequestError("rule", message.rule, "is not a rule of this protocol version")
    fields["rule"] = _RULE_NAMES.get(message.rule)
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
        InvalidRequestError: also when seed or rule are unset, which only the coordinator may choose.
    """
    if not message.sampling.HasField("seed"):
        raise InvalidRequestError("seed", "unset", "must be set on a stream")
    if message.sampling.rule == common_pb2.RULE_UNSPECIFIED:
        raise InvalidRequestError("rule", "unset", "must be set on a stream")
    return SamplingParams(**_law(message.sampling))


def open_sequence(params: SamplingParams, prompt_len: int, vocab_limit: int = 0) -> common_pb2.OpenSequence:
    """The first message's fixed part."""
    return common_pb2.OpenSequence(
        sampling=sampling_to_proto(params), prompt_len=prompt_len, vocab_limit=vocab_limit
    )


# --- draft and verify -----------------------------------------------------------------------------


def check_num_draft_tokens(name: str, value: int) -> int:
    """The count itself, if it lies within the limit."""
    if not 0 <= value <= MAX_NUM_DRAFT_TOKENS:
        raise InvalidRequestError(name, value, f"must lie in [0, {MAX_NUM_DRAFT_TOKENS}]")
    return value


def preparation_to_proto(preparation: Preparation) -> draft_pb2.Preparation:
    """Field by field."""
    return draft_pb2.Preparation(**_fields(preparation))


def preparation_from_proto(message: draft_pb2.Preparation) -> Preparation:
    """Field by field; refuses numbers that make no sense."""
    limits = {"num_outcomes": MAX_NUM_OUTCOMES, "num_draft_tokens": MAX_NUM_DRAFT_TOKENS}
    for name, limit in limits.items():
        if not 1 <= getattr(message, name) <= limit:
            raise InvalidRequestError(f"prepare.{name}", getattr(message, name), f"must lie in [1, {limit}]")
    return Preparation(message.num_outcomes, message.num_draft_tokens)


def refuse_trees(parent_indices: Sequence[int], num_tokens: int) -> None:
    """Trees are in the contract, but no service announces CAPABILITY_TREES yet."""
    if parent_indices and len(parent_indices) != num_tokens:
        raise InvalidRequestError("parent_indices", len(parent_indices), f"must be none or {num_tokens}")
    if any(parent != i - 1 for i, parent in enumerate(parent_indices)):
        raise UnsupportedError("parent_indices", list(parent_indices), "only chains are served")


def proposal_to_proto(proposal: Proposal, path: Sequence[int] = ()) -> draft_pb2.Proposal:
    """A chain with its supports, and the tokens that it was prepared for."""
    return draft_pb2.Proposal(
        token_ids=proposal.token_ids,
        prefix_token_ids=path,
        supports=[
            draft_pb2.Support(token_ids=ids_to_bytes(s.token_ids), probs=floats_to_bytes(s.probs))
            for s in proposal.supports
        ],
    )


def proposal_from_proto(message: draft_pb2.Proposal, base_len: int) -> Proposal:
    """A chain with its supports; refuses trees and supports that do not fit their ids."""
    refuse_trees(message.parent_indices, len(message.token_ids))
    supports = [_support_from_proto(support) for support in message.supports]
    if supports and len(supports) != len(message.token_ids):
        raise InvalidRequestError("supports", len(supports), "must be one for each draft token")
    return Proposal(base_len, list(message.token_ids), supports)


def _support_from_proto(message: draft_pb2.Support) -> Support:
    token_ids = ids_from_bytes(message.token_ids, "supports.token_ids")
    probs = floats_from_bytes(message.probs, "supports.probs")
    if len(token_ids) != len(probs):
        raise InvalidRequestError("supports.probs", len(probs), "must be one for each token id")
    return Support(token_ids, probs)


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
    """What a response says of its service."""
    return common_pb2.Load(
        num_waiting=load.num_waiting,
        num_sequences=load.num_sequences,
        base_ns=load.base_ns,
        sequence_ns=load.sequence_ns,
        token_ns=load.token_ns,
    )


def load_from_proto(message: common_pb2.Load) -> Load:
    """The load that a response reports."""
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


_MODEL_INFO = [name for name in ModelInfo.__dataclass_fields__ if name != "prepares_outcomes"]


def model_info_to_proto(info: ModelInfo) -> common_pb2.ModelInfo:
    """Field by field: the noun has the message's names, capabilities apart."""
    fields = {name: getattr(info, name) for name in _MODEL_INFO}
    capabilities = [common_pb2.CAPABILITY_PREPARED_OUTCOMES] if info.prepares_outcomes else []
    return common_pb2.ModelInfo(**fields, capabilities=capabilities)


def model_info_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    """Field by field: the noun has the message's names, capabilities apart."""
    fields = {name: getattr(message, name) for name in _MODEL_INFO}
    return ModelInfo(
        **fields | {"eos_token_ids": tuple(message.eos_token_ids)},
        prepares_outcomes=common_pb2.CAPABILITY_PREPARED_OUTCOMES in message.capabilities,
    )


# --- generation -----------------------------------------------------------------------------------


def generate_request(
    prompt: str | None,
    params: SamplingParams,
    prompt_token_ids: Sequence[int] | None = None,
    messages: Iterable[dict[str, str]] | None = None,
    *,
    credit_tokens: int = 0,
    report_progress: bool = False,
) -> generation_pb2.GenerateRequest:
    """A client's first request; exactly one of the three prompt forms must be given.

    Args:
        credit_tokens: how far, in tokens, the generation may be ahead of acknowledgements; 0 without limit.
        report_progress: whether chunks say what speculation did so far.
    """
    given = [form is not None for form in (prompt, prompt_token_ids, messages)]
    if sum(given) != 1:
        raise InvalidRequestError(
            "prompt", sum(given), "give exactly one of prompt, prompt_token_ids, messages"
        )
    request = generation_pb2.GenerateRequest(
        sampling=sampling_to_proto(params),
        stop_conditions=generation_pb2.StopConditions(
            max_tokens=params.max_tokens,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        ),
        num_draft_tokens=params.num_draft_tokens,
        credit_tokens=credit_tokens,
        report_progress=report_progress,
    )
    if prompt is not None:
        request.text = prompt
    elif prompt_token_ids is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_checked_ids(prompt_token_ids))
    elif messages is not None:
        request.messages.SetInParent()
        request.messages.messages.extend(_messages(messages))
    return request


def resuming_request(
    original: generation_pb2.GenerateRequest, info: ResumeInfo, token_ids: Sequence[int]
) -> generation_pb2.GenerateRequest:
    """The same request for another coordinator, after these tokens."""
    request = generation_pb2.GenerateRequest()
    request.CopyFrom(original)
    request.sampling.seed = info.seed
    request.sampling.rule = _RULES[info.rule]
    request.context_digest = info.context_digest
    request.generated_token_ids.extend(token_ids)
    return request


def resume_info_to_proto(info: ResumeInfo) -> generation_pb2.ResumeInfo:
    """What the first message of a stream says of it."""
    return generation_pb2.ResumeInfo(
        seed=info.seed, rule=_RULES[info.rule], context_digest=info.context_digest
    )


def resume_info_from_proto(message: generation_pb2.ResumeInfo) -> ResumeInfo:
    """The same, read."""
    return ResumeInfo(
        seed=message.seed, rule=_RULE_NAMES[message.rule], context_digest=message.context_digest
    )


def _checked_ids(token_ids: Sequence[int]) -> list[int]:
    checked = []
    for i, token_id in enumerate(token_ids):
        try:
            checked.append(operator.index(token_id))  # numpy integers are as good as Python's
        except TypeError:
            raise InvalidRequestError(f"prompt_token_ids[{i}]", token_id, "is not a token id") from None
        if isinstance(token_id, bool) or not 0 <= checked[-1] < 2**31:
            raise InvalidRequestError(f"prompt_token_ids[{i}]", token_id, "is not a token id")
    return checked


def _messages(messages: Iterable[dict[str, str]]) -> list[generation_pb2.Message]:
    out = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise InvalidRequestError(f"messages[{i}]", message, "must have exactly role and content")
        if not all(isinstance(value, str) for value in message.values()):
            raise InvalidRequestError(f"messages[{i}]", message, "role and content must be strings")
        out.append(generation_pb2.Message(**message))
    return out


def check_prompt_size(request: generation_pb2.GenerateRequest, max_bytes: int) -> None:
    """Whether the prompt's text is worth encoding, which takes time that others wait.

    Raises:
        InvalidRequestError: naming the form of the prompt.
    """
    form = request.WhichOneof("prompt")
    messages = request.messages.messages
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError("messages", len(messages), f"more than {MAX_MESSAGES} messages")
    num_bytes = {"text": len(request.text.encode()), "messages": request.messages.ByteSize()}.get(
        form or "", 0
    )
    if num_bytes > max_bytes:
        raise InvalidRequestError(str(form), f"{num_bytes} bytes", f"is over the limit of {max_bytes} bytes")


def generate_params(request: generation_pb2.GenerateRequest) -> SamplingParams:
    """All parameters of a client's request."""
    stops = request.stop_conditions
    fields = _law(request.sampling)
    if stops.HasField("max_tokens"):
        fields["max_tokens"] = stops.max_tokens
    if request.HasField("num_draft_tokens"):
        fields["num_draft_tokens"] = request.num_draft_tokens
    return SamplingParams(
        **fields,
        stop=tuple(stops.stop),
        stop_token_ids=tuple(stops.stop_token_ids),
        ignore_eos=stops.ignore_eos,
    )


def opening_credit(request: generation_pb2.GenerateRequest) -> int:
    """How far, in tokens, the generation may be ahead of its client; 0 is without limit.

    Raises:
        InvalidRequestError: out of range.
    """
    credit = request.credit_tokens
    if credit and not MIN_CREDIT_TOKENS <= credit <= MAX_CREDIT_TOKENS:
        problem = f"must be 0 or lie in [{MIN_CREDIT_TOKENS}, {MAX_CREDIT_TOKENS}]"
        raise InvalidRequestError("credit_tokens", credit, problem)
    return credit


def acknowledgement(num_tokens: int) -> generation_pb2.GenerateRequest:
    """So many more tokens are consumed: a request that is not the first of its stream."""
    return generation_pb2.GenerateRequest(credit_tokens=num_tokens)


def acknowledged_tokens(request: generation_pb2.GenerateRequest) -> int:
    """What a request that is not the first of its stream acknowledges, at least 1 token.

    Raises:
        InvalidRequestError: a count below 1, or any other field; the first that is set is named.
    """
    for field, _ in request.ListFields():
        if field.name != "credit_tokens":
            raise InvalidRequestError(field.name, "set", "only the first request of a stream may set it")
    if request.credit_tokens < 1:
        raise InvalidRequestError("credit_tokens", request.credit_tokens, "must be at least 1")
    return request.credit_tokens


def token_to_proto(token: Token) -> generation_pb2.Token:
    """A token on its way to a client."""
    return generation_pb2.Token(
        id=token.token_id,
        text=token.text,
        fate=_FATES[token.fate],
        logprob=token.logprob,
        top_logprobs=[generation_pb2.TopLogprob(token_id=t, logprob=v) for t, v in token.top_logprobs],
    )


def token_from_proto(message: generation_pb2.Token) -> Token:
    """A token as a client sees it."""
    return Token(
        token_id=message.id,
        text=message.text,
        fate=_FATE_NAMES[message.fate],
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def chunk_to_proto(chunk: core.Chunk) -> generation_pb2.Chunk:
    """A chunk; its text is that of its tokens."""
    return generation_pb2.Chunk(
        first_index=chunk.first_index,
        tokens=[token_to_proto(token) for token in chunk.tokens],
        rejected=[token_to_proto(token) for token in chunk.rejected],
        speculation=_speculation_to_proto(chunk.speculation) if chunk.speculation else None,
        timing=_timing_to_proto(chunk.timing) if chunk.timing else None,
        held=[token_to_proto(token) for token in chunk.held],
    )


def chunk_from_proto(message: generation_pb2.Chunk) -> core.Chunk:
    """A chunk as a client sees it."""
    tokens = tuple(token_from_proto(token) for token in message.tokens)
    return core.Chunk(
        text="".join(token.text for token in tokens),
        tokens=tokens,
        rejected=tuple(token_from_proto(token) for token in message.rejected),
        first_index=message.first_index,
        speculation=_noun(core.Speculation, message.speculation) if message.HasField("speculation") else None,
        timing=_noun(core.Timing, message.timing) if message.HasField("timing") else None,
        held=tuple(token_from_proto(token) for token in message.held),
    )


def completion_to_proto(completion: core.Completion) -> generation_pb2.Completion:
    """The end of a stream; text and ids went before, in the chunks."""
    reason = completion.stop_reason
    return generation_pb2.Completion(
        finish_reason=_FINISH_REASONS[completion.finish_reason],
        stop_string=reason if isinstance(reason, str) else None,
        stop_token_id=reason if isinstance(reason, int) else None,
        seed=completion.seed,
        rule=_RULES[completion.rule],
        model=completion.model,
        usage=generation_pb2.Usage(**_fields(completion.usage)),
        speculation=_speculation_to_proto(completion.speculation),
        timing=_timing_to_proto(completion.timing),
    )


def completion_from_proto(
    message: generation_pb2.Completion, tokens: Sequence[Token], num_resumes: int = 0
) -> core.Completion:
    """The completion of a generation that brought these tokens, and was resumed so many times."""
    which = message.WhichOneof("stop_reason")
    return core.Completion(
        text="".join(token.text for token in tokens),
        token_ids=tuple(token.token_id for token in tokens),
        finish_reason=_FINISH_REASON_NAMES[message.finish_reason],
        usage=_noun(core.Usage, message.usage),
        speculation=_noun(core.Speculation, message.speculation),
        timing=_noun(core.Timing, message.timing),
        stop_reason=getattr(message, which) if which else None,
        seed=message.seed,
        rule=_RULE_NAMES[message.rule],
        model=message.model,
        tokens=tuple(tokens),
        num_resumes=num_resumes,
    )


def _speculation_to_proto(speculation: core.Speculation) -> generation_pb2.Speculation:
    return generation_pb2.Speculation(**_fields(speculation))


def _timing_to_proto(timing: core.Timing) -> generation_pb2.GenerationTiming:
    return generation_pb2.GenerationTiming(**_fields(timing))


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _noun(kind: Any, message: Any) -> Any:
    """A dataclass from the message with the same field names; repeated fields become tuples."""
    return kind(
        **{
            name: value if isinstance(value, str | int | float) else tuple(value)
            for name in kind.__dataclass_fields__
            for value in [getattr(message, name)]
        }
    )
