"""What the messages of all three services share, as nouns and back. No I/O."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from specwire.core import PARAMETERS, Learning, Load, ModelInfo, Rule, SamplingParams
from specwire.errors import InvalidRequestError
from specwire.text.grammar import Grammar
from specwire.v1 import common_pb2

RULES = {rule: getattr(common_pb2, f"RULE_{rule.name}") for rule in Rule}
RULE_NAMES = {number: rule for rule, number in RULES.items()}


# --- sampling parameters --------------------------------------------------------------------------

_TRANSLATED = ("rule", "grammar", "max_tokens", "early_stopping")


def params_to_proto(message: type[Any], params: SamplingParams) -> dict[str, Any]:
    """Arguments of a message: the parameters that it has under their names, and in their form."""
    return {name: getattr(params, name) for name in _same_names(message.DESCRIPTOR)}


def params_from_proto(message: Any) -> dict[str, Any]:
    """The same, as arguments of `SamplingParams`; fields that are unset are left out."""
    return {
        name: getattr(message, name)
        for name, can_be_unset in _same_names(message.DESCRIPTOR).items()
        if not can_be_unset or message.HasField(name)
    }


@functools.cache
def _same_names(descriptor: Any) -> dict[str, bool]:
    """The parameters of a message that are not `_TRANSLATED`, and whether they can be unset."""
    shared = [field for field in descriptor.fields if field.name in PARAMETERS]
    return {field.name: field.has_presence for field in shared if field.name not in _TRANSLATED}


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """The parameters that determine the distribution of the next token."""
    grammar = None
    if params.grammar is not None:  # has one field that is given
        kind, texts = params.grammar.kind, params.grammar.choice
        given: Any = common_pb2.Choice(texts=texts) if texts else getattr(params.grammar, kind)
        grammar = common_pb2.Grammar(**{kind: given})
    return common_pb2.SamplingParams(
        **params_to_proto(common_pb2.SamplingParams, params),
        rule=RULES[params.rule] if params.rule else common_pb2.RULE_UNSPECIFIED,
        grammar=grammar,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The same, as arguments of `SamplingParams`."""
    if message.rule and message.rule not in RULE_NAMES:
        raise InvalidRequestError("rule", message.rule, "is not a rule of this protocol version")
    grammar = None
    if message.HasField("grammar"):
        kind = message.grammar.WhichOneof("source")
        if kind is None:
            raise InvalidRequestError("grammar", "unset", "must have a source")
        given: Any = getattr(message.grammar, kind)
        fields: dict[str, Any] = {kind: tuple(given.texts) if kind == "choice" else given}
        grammar = Grammar(**fields)
    return params_from_proto(message) | {"rule": RULE_NAMES.get(message.rule), "grammar": grammar}


def opened_params(message: common_pb2.OpenSequence) -> SamplingParams:
    """Parameters of a sequence at a model service, with seed and rule, which the coordinator chooses."""
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


def load_to_proto(load: Load) -> common_pb2.Load:
    """The noun has the message's names."""
    return common_pb2.Load(**{name: getattr(load, name) for name in _LOAD})


def load_from_proto(message: common_pb2.Load) -> Load:
    """The load of a response."""
    counts = {name: getattr(message, name) for name in _LOAD}
    return Load(**counts | {"num_sequences": max(1, message.num_sequences)})


_LOAD = [*Load.__dataclass_fields__]
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
    """The same from the message."""
    fields = {name: getattr(message, name) for name in _MODEL_INFO}
    fields |= {name: number in message.capabilities for name, number in _CAPABILITIES.items()}
    fields |= {name: tuple(fields[name]) for name in ("eos_token_ids", "decoder_token_ids", "devices")}
    fields["adapters"] = dict(sorted(message.adapters.items()))  # a map of the wire has no order
    if message.HasField("costs"):
        fields["costs"] = load_from_proto(message.costs)
    if message.HasField("learning"):
        fields["learning"] = Learning(**{name: getattr(message.learning, name) for name in _LEARNING})
    return ModelInfo(**fields)
