"""Every size and count of a request has a limit; what is over it is refused by name, and errors tell no more.

Messages are built by hand here, past everything that the client checks.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor

from specwire import InvalidRequestError, ResourceExhaustedError, SpecwireError
from specwire.core import (
    MAX_AT_ONCE,
    MAX_CACHE_SALT_LEN,
    MAX_CREDIT_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_PATH_LEN,
    MAX_STOP_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_CREDIT_TOKENS,
    PARAMETERS,
    Preparation,
    Proposal,
)
from specwire.rpc.wire.client import MAX_MESSAGES
from specwire.rpc.wire.columns import MAX_TRACEPARENT_LEN
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import MAX_AHEAD_OF_MESSAGE, AheadOrder, VerifyOrder
from specwire.text.grammar import MAX_CHOICES, MAX_SOURCE_LEN
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, generation_pb2_grpc, verify_pb2
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import SequenceFailedError, draft, opening, raw_stream, sampling, verify
from tests.support.parameters import INVALID
from tests.support.refusals import our_errors

MANY = 100_000
"""Over every context and vocabulary here."""
MAX_PROMPT_BYTES = 2_000

SAMPLING: dict[str, Any] = {"seed": 1, "rule": common_pb2.RULE_REJECTION}
PROMPT = {"token_ids": {"ids": [1, 2, 3]}}


def generation(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(**(PROMPT | fields))


def sampled(**sampling: Any) -> generation_pb2.GenerateRequest:
    return generation(sampling=SAMPLING | sampling)


def stopped(**conditions: Any) -> generation_pb2.GenerateRequest:
    return generation(stop_conditions=conditions)


def conversation(*messages: dict[str, str], **fields: str) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(messages={"messages": list(messages), **fields})


VALID = opening()


def drafting(opened: common_pb2.OpenSequence = VALID, **changes: Any) -> draft_pb2.DraftRequest:
    return draft(DraftOrder(1, 1, 0, [3], 0)._replace(**changes), opened=[opened])


def verifying(opened: common_pb2.OpenSequence = VALID, **changes: Any) -> verify_pb2.VerifyRequest:
    return verify(VerifyOrder(1, 1, 0, [3])._replace(**changes), opened=[opened])


def ahead(num: int = 1, **changes: Any) -> verify_pb2.VerifyRequest:
    """Proposals ahead of verdicts, for a sequence whose tokens are matched."""
    matched = opening(sampling=sampling(rule=common_pb2.RULE_GUMBEL), may_go_on=True)
    order = AheadOrder(1, 1, [5], Proposal(3, [4]))
    if "token_ids" in changes:
        order = order._replace(proposal=Proposal(3, changes.pop("token_ids")))
    return verify(*[order._replace(**changes)] * num, opened=[matched])


def ahead_with(**columns: Any) -> verify_pb2.VerifyRequest:
    """One such proposal with these columns, whether they fit the others or not."""
    request = ahead()
    if own := {name: columns.pop(name) for name in [*columns] if name in _PROPOSALS}:
        with_columns(request.ahead.proposals, **own)
    with_columns(request.ahead, **columns)
    return request


def with_columns(request: Any, **columns: Any) -> Any:
    """The request with these columns, whether they fit the others or not."""
    for name in columns:
        request.ClearField(name)
    request.MergeFrom(type(request)(**columns))
    return request


_PROPOSALS = common_pb2.Proposals.DESCRIPTOR.fields_by_name

#: Of each field: a request where it is over its limit or out of its range; and the name in the refusal, where
#: that is another one.
LIMITS: dict[str, Any] = {
    "GenerateRequest.text": generation_pb2.GenerateRequest(text="x" * (MAX_PROMPT_BYTES + 1)),
    "GenerateRequest.context_digest": generation(context_digest="0" * 20_000),
    "TokenIds.ids": (generation(token_ids={"ids": [1] * MANY}), "max_tokens"),
    "Messages.messages": conversation(*[{"role": "user"}] * (MAX_MESSAGES + 1)),
    "Message.role": (conversation({"role": "r" * MAX_PROMPT_BYTES}), "messages"),
    "Message.content": (conversation({"role": "user", "content": "x" * MAX_PROMPT_BYTES}), "messages"),
    "Message.other_fields": (conversation({"other_fields": "x" * MAX_PROMPT_BYTES}), "messages"),
    "Messages.tools": (conversation(tools="x" * MAX_PROMPT_BYTES), "messages"),
    "Messages.template_kwargs": (conversation(template_kwargs="x" * MAX_PROMPT_BYTES), "messages"),
    "StopConditions.stop": stopped(stop=["x"] * (MAX_STOP_STRINGS + 1)),
    "StopConditions.stop (each)": stopped(stop=["x" * (MAX_STOP_LEN + 1)]),
    "StopConditions.stop_token_ids": stopped(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)),
    "OpenSequence.cache_salt": verifying(opening(cache_salt="s" * (MAX_CACHE_SALT_LEN + 1))),
    "SamplingParams.end_token_ids": (
        verifying(opening(sampling=sampling(min_tokens=1, end_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)))),
        "stop_token_ids",
    ),
    "SamplingParams.logit_bias": sampled(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)),
    "Grammar.json_schema": (
        sampled(grammar={"json_schema": f'{{"title": "{"a" * MAX_SOURCE_LEN}"}}'}),
        "grammar",
    ),
    "Grammar.regex": (sampled(grammar={"regex": "a" * (MAX_SOURCE_LEN + 1)}), "grammar.regex"),
    "Grammar.ebnf": (sampled(grammar={"ebnf": "a" * (MAX_SOURCE_LEN + 1)}), "grammar.ebnf"),
    "Choice.texts": (sampled(grammar={"choice": {"texts": ["a"] * (MAX_CHOICES + 1)}}), "grammar.choice"),
    "Choice.texts (each)": (sampled(grammar={"choice": {"texts": ["a" * MANY]}}), "grammar.choice"),
    "DraftRequest.token_ids": drafting(token_ids=[1] * MANY),
    "DraftRequest.traceparents": (drafting(traceparent="0" * (MAX_TRACEPARENT_LEN + 1)), "traceparent"),
    "VerifyRequest.token_ids": verifying(token_ids=[1] * MANY),
    "Proposals.num_tokens (verify)": verifying(proposal=Proposal(1, [1] * 65)),
    "AheadProposals.sequence_ids": verify_pb2.VerifyRequest(
        ahead={"sequence_ids": [1] * (MAX_AHEAD_OF_MESSAGE + 1)}
    ),
    "AheadProposals.ahead_ids (each)": ahead(num=2),
    "AheadProposals.path_lens": ahead(path=[5] * (MAX_PATH_LEN + 1)),
    "AheadProposals.path_token_ids": ahead_with(path_token_ids=bytes(MANY)),
    "AheadProposals.path_token_ids (each)": ahead(path=[MANY]),
    "Proposals.num_tokens": ahead(token_ids=[4] * 65),
    "Proposals.token_ids": ahead_with(token_ids=bytes(MANY)),
    "Proposals.token_ids (each)": ahead(token_ids=[MANY]),
    "Proposals.parent_indices": ahead_with(parent_indices=bytes(MANY)),
    "Proposals.support_lens": ahead_with(support_lens=bytes(MANY)),
    "Proposals.support_token_ids": ahead_with(support_token_ids=bytes(MANY)),
    "Proposals.support_probs": ahead_with(support_probs=bytes(MANY)),
    "VerifyRequest.traceparents": (verifying(traceparent="0" * (MAX_TRACEPARENT_LEN + 1)), "traceparent"),
    "GenerateRequest.prompt (unset)": generation_pb2.GenerateRequest(),
    "GenerateRequest.credit_tokens": generation(credit_tokens=MAX_CREDIT_TOKENS + 1),
    "GenerateRequest.credit_tokens (too few)": generation(credit_tokens=MIN_CREDIT_TOKENS - 1),
    "GenerateRequest.credit_tokens (negative)": generation(credit_tokens=-1),
    "TokenIds.ids (empty)": (generation(token_ids={}), "prompt"),
    "TokenIds.ids (negative)": (generation(token_ids={"ids": [-5]}), "prompt_token_ids[0]"),
    "Messages.messages (empty)": conversation(),
    "StopConditions.max_tokens": stopped(max_tokens=2**31 - 1),
    "GenerateRequest.prompt_only": (generation(prompt_only=True), "max_tokens"),
    "Grammar.json_object": (sampled(grammar={"json_object": False}), "grammar"),
    "OpenSequence.sequence_id": drafting(opening(0)),
    "OpenSequence.timeout_ms": verifying(opening(timeout_ms=-1)),
    "SamplingParams.end_token_ids (of a client)": sampled(min_tokens=2, end_token_ids=[5]),
    "DraftRequest.open": draft_pb2.DraftRequest(open=[opening(0)] * (MAX_AT_ONCE + 1)),
    "VerifyRequest.open": verify_pb2.VerifyRequest(open=[opening(0)] * (MAX_AT_ONCE + 1)),
    "DraftRequest.sequence_ids (too many)": draft_pb2.DraftRequest(sequence_ids=[1] * (MAX_AT_ONCE + 1)),
    "VerifyRequest.sequence_ids (too many)": verify_pb2.VerifyRequest(sequence_ids=[1] * (MAX_AT_ONCE + 1)),
    "OpenSequence.prompt_len": verifying(opening(prompt_len=2**31 - 1)),
    "OpenSequence.vocab_limit": drafting(opening(vocab_limit=-1)),
    "BeamSearch.early_stopping": generation(beam_search={"num_beams": 2, "early_stopping": 9}),
    "DraftRequest.sequence_ids": drafting(sequence_id=2),
    "DraftRequest.base_lens": (drafting(base_len=-1), "base_len"),
    "DraftRequest.num_tokens": with_columns(drafting(), num_tokens=[-1]),
    "DraftRequest.num_draft_tokens": drafting(num_draft_tokens=65),
    "DraftRequest.num_draft_tokens (negative)": drafting(num_draft_tokens=-1),
    "DraftRequest.num_arrived_bytes": with_columns(drafting(), num_arrived_bytes=1),
    "DraftRequest.max_depths": (drafting(max_depth=65), "max_depth"),
    "DraftRequest.request_ids": with_columns(drafting(), request_ids=[1, 2]),
    "DraftRequest.base_lens (too many)": with_columns(drafting(), base_lens=[0, 0]),
    "DraftRequest.num_tokens (too few)": with_columns(drafting(), num_tokens=[]),
    "DraftRequest.num_draft_tokens (too many)": with_columns(drafting(), num_draft_tokens=[2, 2]),
    "DraftRequest.max_depths (too many)": with_columns(drafting(), max_depths=[0, 0]),
    "DraftRequest.traceparents (too many)": with_columns(drafting(), traceparents=["", ""]),
    "Preparations.num_outcomes (too many)": with_columns(drafting(), prepare={"num_outcomes": [1, 1]}),
    "DraftRequest.num_chains": drafting(num_draft_tokens=4, num_chains=17),
    "Preparations.num_outcomes": (drafting(prepare=Preparation(65, 1)), "prepare.num_outcomes"),
    "Preparations.num_outcomes (none)": (drafting(prepare=Preparation(0, 1)), "prepare.num_outcomes"),
    "Preparations.num_draft_tokens (none)": (drafting(prepare=Preparation(1, 0)), "prepare.num_draft_tokens"),
    "Preparations.num_draft_tokens": (drafting(prepare=Preparation(1, 65)), "prepare.num_draft_tokens"),
    "Preparations.max_depths": (drafting(prepare=Preparation(1, 1, 65)), "prepare.max_depth"),
    "VerifyRequest.sequence_ids": verifying(sequence_id=2**40),
    "VerifyRequest.base_lens": (verifying(base_len=-1), "base_len"),
    "VerifyRequest.num_tokens": (with_columns(verifying(), num_tokens=[2**31 - 1]), "token_ids"),
    "VerifyRequest.ahead_ids": verifying(ahead_id=1),
    "VerifyRequest.request_ids": with_columns(verifying(), request_ids=[1, 2]),
    "VerifyRequest.base_lens (too many)": with_columns(verifying(), base_lens=[0, 0]),
    "VerifyRequest.token_ids (part of one)": with_columns(verifying(), token_ids=b"123"),
    "AheadProposals.sequence_ids (each)": ahead(sequence_id=2),
    "AheadProposals.ahead_ids": ahead(ahead_id=0),
    "AheadProposals.base_lens": ahead(proposal=Proposal(-1, [4])),
    "AheadProposals.base_lens (each)": ahead(proposal=Proposal(2**30, [4])),
    "AheadProposals.path_lens (each)": ahead_with(path_lens=[-1]),
    "Proposals.num_tokens (each)": ahead(token_ids=[]),
    "Proposals.num_tokens (negative)": ahead_with(num_tokens=[-1]),
    "Proposals.support_lens (each)": (
        ahead_with(support_lens=np.array([2**32 - 1], "<u4").tobytes()),
        "support_token_ids",
    ),
    "Proposals.num_chains": ahead_with(num_chains=[2]),
    "VerifyRequest.num_next_draft_tokens": with_columns(verifying(), num_next_draft_tokens=[65]),
    "VerifyRequest.next_max_depths": with_columns(verifying(), next_max_depths=[-1]),
    "VerifyRequest.num_plain_ahead": with_columns(verifying(), num_plain_ahead=[65]),
    "OpenSequence.end_len": verifying(opening(end_len=2**30)),
}


def _with_parameter(kind: Any, name: str, value: Any) -> generation_pb2.GenerateRequest:
    """A generation whose message of that kind has a value for one parameter."""
    if kind is generation_pb2.BeamSearch:
        return generation(beam_search={"num_beams": 2} | {name: value})
    making = {common_pb2.SamplingParams: sampled, generation_pb2.StopConditions: stopped}
    return making.get(kind, generation)(**{name: value})


LIMITS |= {
    f"{kind.DESCRIPTOR.name}.{name} (parameter)": _with_parameter(kind, name, INVALID[name][0])
    for kind in (
        *(common_pb2.SamplingParams, generation_pb2.StopConditions, generation_pb2.GenerateRequest),
        generation_pb2.BeamSearch,
    )
    for name in PARAMETERS
    if name in kind.DESCRIPTOR.fields_by_name and name not in ("ignore_eos", "grammar", "early_stopping")
}

#: Any value will do, or its own test has it.
FREE = {
    "DraftRequest.close",
    "VerifyRequest.close",
    "OpenSequence.may_go_on",
    "OpenSequence.may_learn",
    "OpenSequence.trace_headers",
    "StopConditions.ignore_eos",
    "GenerateRequest.keep_special_tokens",
    "GenerateRequest.generated_token_ids",
    "GenerateRequest.report_progress",
}

PROMPT_FIELD = "GenerateRequest.prompt"
"""One of several fields of the message."""

REQUESTS: Sequence[Any] = (generation_pb2.GenerateRequest, draft_pb2.DraftRequest, verify_pb2.VerifyRequest)

#: Internals that no error message may reveal.
TELLTALE = re.compile(
    r"<class|Traceback|\.py\b|\bspecwire\.|google\.protobuf|object at 0x|/(home|root|tmp|usr)/"
)


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    limits = {"max_prompt_bytes": MAX_PROMPT_BYTES}
    with local_stack("emulated:step_ms=0", "emulated:step_ms=0", coordinator_options=limits) as running:
        yield running


def error_of(stack: LocalStack, request: Any, metadata: Any = ()) -> SpecwireError:
    """What a stream, or its first sequence, ends with that begins with this request."""
    send = _generate if isinstance(request, generation_pb2.GenerateRequest) else _ask
    with pytest.raises(SpecwireError) as refused:
        send(stack, request, metadata)
    assert not TELLTALE.search(str(refused.value)), refused.value
    return refused.value


def _generate(stack: LocalStack, request: Any, metadata: Any) -> None:
    with grpc.insecure_channel(stack.address) as channel, our_errors():
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        list(stub.Generate(iter([request]), timeout=30, metadata=metadata))


def _ask(stack: LocalStack, request: Any, metadata: Any) -> None:
    role = "draft" if isinstance(request, draft_pb2.DraftRequest) else "verify"
    with raw_stream(stack, role, metadata) as stream:
        try:
            stream.ask(request)
        except SequenceFailedError as failed:
            raise failed.error from None


@pytest.mark.parametrize("name", LIMITS)
def test_over_the_limit(stack: LocalStack, name: str) -> None:
    given = LIMITS[name]
    request, field = given if isinstance(given, tuple) else (given, re.split("[. ]", name)[1])
    error = error_of(stack, request)
    assert isinstance(error, InvalidRequestError), error
    assert error.field.startswith(field)
    assert len(str(error)) < 500


def fields_of(message: Descriptor) -> Iterator[str]:
    """All fields of a request, those of the messages in it included."""
    for field in message.fields:
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        if inner is None or field.is_repeated:
            yield f"{message.name}.{field.name}"
        if inner is not None and not is_map:
            yield from fields_of(inner)


def test_no_field_is_forgotten() -> None:
    names = {name for request in REQUESTS for name in fields_of(request.DESCRIPTOR)}
    assert names - FREE == {name.partition(" (")[0] for name in LIMITS} - {PROMPT_FIELD}


def test_what_a_client_of_another_version_asks_for_is_not_ignored(stack: LocalStack) -> None:
    """Of a request, of a part of it, and of one that acknowledges tokens."""
    unknown = b"\xf8\x07\x01"  # field 127
    sampling = common_pb2.SamplingParams.FromString(unknown)
    later = generation_pb2.GenerateRequest.FromString(unknown)
    in_part, later_in_stream = generation(sampling=sampling), [generation(credit_tokens=64), later]
    with grpc.insecure_channel(stack.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        for requests, name in (([in_part], "sampling"), ([later], "request"), (later_in_stream, "request")):
            with pytest.raises(InvalidRequestError, match=f"{name}=field 127: is not known"), our_errors():
                list(stub.Generate(iter(requests), timeout=30))


def test_metadata_is_limited(stack: LocalStack) -> None:
    assert isinstance(error_of(stack, generation(), [("x-much", "x" * 20_000)]), ResourceExhaustedError)


def test_a_peer_that_floods_pings_is_disconnected(stack: LocalStack) -> None:
    host, port = stack.address.split(":")
    settings = struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
    ping = struct.pack(">I", 8)[1:] + b"\x06\x00" + bytes(4) + bytes(8)
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + ping * 200)
        received = b""
        while data := peer.recv(65536):
            received += data
    assert b"too_many_pings" in received


def test_what_a_stranger_may_learn(stack: LocalStack) -> None:
    """A method that is not there, and the handshake: no path, no class."""
    with grpc.insecure_channel(stack.address) as channel:
        with pytest.raises(grpc.RpcError) as unknown:
            channel.unary_unary("/specwire.v1.GenerationService/None")(b"", timeout=30)
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not TELLTALE.search(unknown.value.details())
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert not TELLTALE.search(str(stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=30)))
