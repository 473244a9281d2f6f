"""What the messages of all three services share, as nouns and back. No I/O.

Incoming messages are checked in this folder, which alone knows both sides, so that the rest of the code has
only valid nouns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from specwire.core import MAX_NUM_DRAFT_TOKENS, Learning, Load, ModelInfo, Rule, SamplingParams
from specwire.errors import InvalidRequestError
from specwire.text.grammar import Grammar
from specwire.v1 import common_pb2

RULES = {
    Rule.REJECTION: common_pb2.RULE_REJECTION,
    Rule.BLOCK: common_pb2.RULE_BLOCK,
    Rule.KSEQ: common_pb2.RULE_KSEQ,
    Rule.GUMBEL: common_pb2.RULE_GUMBEL,
}
RULE_NAMES = {number: rule for rule, number in RULES.items()}
_WARPS = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_ALWAYS_SET = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens")
"""Not optional in the message: unset is their neutral value."""


# --- sampling parameters --------------------------------------------------------------------------


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """The parameters that determine the distribution of the next token."""
    return common_pb2.SamplingParams(
        **{name: getattr(params, name) for name in (*_WARPS, *_PENALTIES)},
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        rule=RULES[params.rule] if params.rule else common_pb2.RULE_UNSPECIFIED,
        logprobs=params.logprobs,
        grammar=grammar_to_proto(params.grammar) if params.grammar else None,
        min_tokens=params.min_tokens,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The same, as arguments of `SamplingParams`; unset fields are left out, except for the rule.

    Raises:
        InvalidRequestError: an unknown rule, or a grammar that cannot be one.
    """
    fields: dict[str, Any] = {name: getattr(message, name) for name in _ALWAYS_SET}
    for name in ("temperature", "top_p", "repetition_penalty", "seed", "logprobs"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    if message.rule and message.rule not in RULE_NAMES:
        raise InvalidRequestError("rule", message.rule, "is not a rule of this protocol version")
    fields["rule"] = RULE_NAMES.get(message.rule)
    fields["logit_bias"] = dict(message.logit_bias)
    if message.HasField("grammar"):
        fields["grammar"] = grammar_from_proto(message.grammar)
    return fields


def grammar_to_proto(grammar: Grammar) -> common_pb2.Grammar:
    """The one field that is given."""
    if grammar.choice:
        return common_pb2.Grammar(choice=common_pb2.Choice(texts=grammar.choice))
    return common_pb2.Grammar(**{grammar.kind: getattr(grammar, grammar.kind)})


def grammar_from_proto(message: common_pb2.Grammar) -> Grammar:
    """Raises:
    InvalidRequestError: nothing is given, or it is out of bounds.
    """
    kind = message.WhichOneof("source")
    if kind is None:
        raise InvalidRequestError("grammar", "unset", "must have a source")
    if kind == "choice":
        return Grammar(choice=tuple(message.choice.texts))
    fields: dict[str, Any] = {kind: getattr(message, kind)}
    return Grammar(**fields)


def opened_params(message: common_pb2.OpenSequence) -> SamplingParams:
    """Parameters of a sequence at a model service.

    Raises:
        InvalidRequestError: also if seed or rule are unset, which the coordinator chooses.
    """
    if not message.sampling.HasField("seed"):
        raise InvalidRequestError("seed", "unset", "must be set for a sequence")
    if message.sampling.rule == common_pb2.RULE_UNSPECIFIED:
        raise InvalidRequestError("rule", "unset", "must be set for a sequence")
    return SamplingParams(
        **sampling_from_proto(message.sampling),
        max_tokens=None,
        stop_token_ids=tuple(message.sampling.end_token_ids),
        cache_salt=message.cache_salt,
    )


def open_sequence(
    params: SamplingParams,
    prompt_len: int,
    vocab_limit: int = 0,
    trace_headers: Iterable[tuple[str, str]] = (),
    *,
    may_go_on: bool = False,
    end_len: int = 0,
    may_learn: bool = False,
) -> common_pb2.OpenSequence:
    """What opens a sequence; the caller fills in its id and its deadline."""
    sampling = sampling_to_proto(params)
    if params.min_tokens:
        sampling.end_token_ids.extend(params.stop_token_ids)
    return common_pb2.OpenSequence(
        sampling=sampling,
        prompt_len=prompt_len,
        vocab_limit=vocab_limit,
        cache_salt=params.cache_salt,
        trace_headers=dict(trace_headers),
        may_go_on=may_go_on,
        end_len=end_len,
        may_learn=may_learn,
    )


# --- draft and verify -----------------------------------------------------------------------------


def check_num_draft_tokens(name: str, value: int) -> int:
    """The count itself, if it is within the limit."""
    if not 0 <= value <= MAX_NUM_DRAFT_TOKENS:
        raise InvalidRequestError(name, value, f"must lie in [0, {MAX_NUM_DRAFT_TOKENS}]")
    return value


def load_to_proto(load: Load) -> common_pb2.Load:
    """The load that a response reports."""
    return common_pb2.Load(
        num_waiting=load.num_waiting,
        num_sequences=load.num_sequences,
        base_ns=load.base_ns,
        sequence_ns=load.sequence_ns,
        token_ns=load.token_ns,
        draft_pass_ns=load.draft_pass_ns,
        draft_node_ns=load.draft_node_ns,
        prefill_ns=load.prefill_ns,
    )


def load_from_proto(message: common_pb2.Load) -> Load:
    """The load of a response."""
    return Load(
        message.num_waiting,
        max(1, message.num_sequences),
        message.base_ns,
        message.sequence_ns,
        message.token_ns,
        message.draft_pass_ns,
        message.draft_node_ns,
        message.prefill_ns,
    )


_CAPABILITIES = {
    "prepares_outcomes": common_pb2.CAPABILITY_PREPARED_OUTCOMES,
    "batch_invariant": common_pb2.CAPABILITY_BATCH_INVARIANT,
    "trees": common_pb2.CAPABILITY_TREES,
    "drafts": common_pb2.CAPABILITY_DRAFTS,
    "grammars": common_pb2.CAPABILITY_GRAMMARS,
}
_MODEL_INFO = [
    name for name in ModelInfo.__dataclass_fields__ if name not in {*_CAPABILITIES, "learning", "costs"}
]
_LEARNING = [*Learning.__dataclass_fields__]


def model_info_to_proto(info: ModelInfo) -> common_pb2.ModelInfo:
    """Field by field: the noun has the message's names, capabilities apart."""
    fields = {name: getattr(info, name) for name in _MODEL_INFO}
    capabilities = [number for name, number in _CAPABILITIES.items() if getattr(info, name)]
    learning = common_pb2.Learning(**asdict(info.learning)) if info.learning else None
    costs = load_to_proto(info.costs) if info.costs else None
    return common_pb2.ModelInfo(**fields, capabilities=capabilities, learning=learning, costs=costs)


def model_info_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    """Field by field: the noun has the message's names, capabilities apart."""
    fields = {name: getattr(message, name) for name in _MODEL_INFO}
    fields |= {name: number in message.capabilities for name, number in _CAPABILITIES.items()}
    fields |= {name: tuple(fields[name]) for name in ("eos_token_ids", "decoder_token_ids", "devices")}
    if message.HasField("costs"):
        fields["costs"] = load_from_proto(message.costs)
    if message.HasField("learning"):
        fields["learning"] = Learning(**{name: getattr(message.learning, name) for name in _LEARNING})
    return ModelInfo(**fields)
