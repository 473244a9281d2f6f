"""What the messages of all three services share, as nouns and back. No I/O."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from specwire.core import SAMPLING_DEFAULTS, Learning, Load, ModelInfo, Rule, SamplingParams
from specwire.errors import InvalidRequestError
from specwire.text.grammar import Grammar
from specwire.v1 import common_pb2

Sent = TypeVar("Sent", bound=Message)
Noun = TypeVar("Noun")
RULES = {rule: getattr(common_pb2, f"RULE_{rule.name}") for rule in Rule}
RULE_NAMES = {number: rule for rule, number in RULES.items()}


# --- fields by their names ------------------------------------------------------------------------


def to_message(kind: type[Sent], noun: Any, **others: Any) -> Sent:
    """A message with the fields of a dataclass that it has under the same names, and with others."""
    given = {name: getattr(noun, name) for name in _same_names(kind.DESCRIPTOR, noun.__class__)}
    given.update(others)
    return kind(**given)


def from_message(kind: type[Noun], message: Any, **others: Any) -> Noun:
    """A dataclass with the fields of a message that it has under the same names, and with others."""
    return kind(**fields_of(message, kind) | others)


def fields_of(message: Any, kind: Any) -> dict[str, Any]:
    """The fields of a message that are set, or cannot be unset, and that a dataclass has too."""
    found = {}
    for name, (is_optional, is_list) in _same_names(message.DESCRIPTOR, kind).items():
        if not is_optional or message.HasField(name):
            value = getattr(message, name)
            found[name] = tuple(value) if is_list else value
    return found


@functools.cache
def _same_names(descriptor: Any, kind: Any) -> dict[str, tuple[bool, bool]]:
    """The fields of both: whether they can be unset, and whether they are lists of values."""
    return {
        each.name: (each.has_presence, each.is_repeated and each.message_type is None)
        for each in descriptor.fields
        if each.name in kind.__dataclass_fields__
    }


# --- sampling parameters --------------------------------------------------------------------------


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """The parameters that determine the distribution of the next token."""
    grammar = None
    if params.grammar is not None:  # has one field that is given
        kind, texts = params.grammar.kind, params.grammar.choice
        given: Any = common_pb2.Choice(texts=texts) if texts else getattr(params.grammar, kind)
        grammar = common_pb2.Grammar(**{kind: given})
    rule = RULES[params.rule] if params.rule else common_pb2.RULE_UNSPECIFIED
    return to_message(common_pb2.SamplingParams, params, rule=rule, grammar=grammar)


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
    translated = {"rule": RULE_NAMES.get(message.rule), "grammar": grammar}
    return fields_of(message, SamplingParams) | translated


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


_LOAD = operator.attrgetter(*Load.__dataclass_fields__)  # one in each answer of verify


def load_to_proto(load: Load) -> common_pb2.Load:
    return to_message(common_pb2.Load, load)


def load_from_proto(message: common_pb2.Load) -> Load:
    figures = _LOAD(message)
    if min(figures) < 0:
        raise InvalidRequestError("load", min(figures), "must be at least 0")
    load = Load(*figures)
    return load if load.num_sequences else replace(load, num_sequences=1)


_CAPABILITIES = {
    "prepares_outcomes": common_pb2.CAPABILITY_PREPARED_OUTCOMES,
    "batch_invariant": common_pb2.CAPABILITY_BATCH_INVARIANT,
    "trees": common_pb2.CAPABILITY_TREES,
    "drafts": common_pb2.CAPABILITY_DRAFTS,
    "grammars": common_pb2.CAPABILITY_GRAMMARS,
}


def model_info_to_proto(info: ModelInfo) -> common_pb2.ModelInfo:
    """What a model service says of itself."""
    return to_message(
        common_pb2.ModelInfo,
        info,
        capabilities=[number for name, number in _CAPABILITIES.items() if getattr(info, name)],
        learning=to_message(common_pb2.Learning, info.learning) if info.learning else None,
        costs=load_to_proto(info.costs) if info.costs else None,
        sampling=common_pb2.SamplingParams(**info.sampling),
    )


def model_info_from_proto(message: common_pb2.ModelInfo) -> ModelInfo:
    """The same from the message."""
    given = fields_of(message.sampling, SamplingParams)
    sampling = {
        name: given[name]
        for name, neutral in SAMPLING_DEFAULTS.items()
        if given.get(name, neutral) != neutral
    }
    SamplingParams(**sampling)  # refuses what no request could ask for
    return from_message(
        ModelInfo,
        message,
        **{name: number in message.capabilities for name, number in _CAPABILITIES.items()},
        learning=from_message(Learning, message.learning) if message.HasField("learning") else None,
        costs=load_from_proto(message.costs) if message.HasField("costs") else None,
        adapters=dict(sorted(message.adapters.items())),  # a map has no order
        sampling=sampling,
    )
