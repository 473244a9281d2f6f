"""Messages and nouns: what goes out comes back, and what cannot be a noun is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specwire import errors
from specwire.completion import (
    Chunk,
    Completion,
    FinishReason,
    Hypothesis,
    SourceCounts,
    Speculation,
    Timing,
    Token,
    Usage,
)
from specwire.core import (
    Continuation,
    Fate,
    Learning,
    Load,
    Logprobs,
    ModelInfo,
    Outcome,
    Preparation,
    Proposal,
    Rule,
    SamplingParams,
    Timings,
    Verdict,
)
from specwire.errors import InternalError, InvalidRequestError, SpecwireError
from specwire.rpc.statuses import from_rpc_error, to_status
from specwire.rpc.wire import client as client_wire
from specwire.rpc.wire import columns, proposals
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import model as wire
from specwire.rpc.wire import verify as verify_wire
from specwire.rpc.wire.draft import DraftAnswer, DraftOrder, PreparedAnswer
from specwire.rpc.wire.verify import VerifyAnswer, VerifyOrder
from specwire.support import Support
from specwire.text.grammar import Grammar
from specwire.v1 import common_pb2, generation_pb2
from tests.support.chunks import message_of
from tests.support.parameters import VALUES

EVERYTHING = SamplingParams(**VALUES | {"seed": 2**63 - 1})
ZEROS = SamplingParams(temperature=0.0, seed=0, num_draft_tokens=0, logprobs=0)
SAID = [{"role": "user", "content": "hi"}]

GRAMMARS = [
    Grammar(json_schema={"type": "integer"}),
    Grammar(json_object=True),
    Grammar(regex="a+"),
    Grammar(choice=("yes", "no")),
    Grammar(ebnf='root ::= "a"'),
]


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def filled(noun: Any, **others: Any) -> Any:
    """Each field with a value of its own that is no default: these, and by their types the others."""
    for number, each in enumerate(dataclasses.fields(noun), start=2):
        values: dict[Any, Any] = {"str": f"s{number}", "int": number, "float": number / 4, "bool": True}
        values |= {"tuple[int, ...]": (number, 0), "tuple[str, ...]": (f"s{number}", "")}
        if each.name not in others:
            others[each.name] = values[each.type]
    return noun(**others)


class TestSamplingParams:
    def test_everything_differs_from_the_defaults(self) -> None:
        names = {f.name for f in dataclasses.fields(SamplingParams)}
        default = SamplingParams()
        assert all(getattr(EVERYTHING, name) != getattr(default, name) for name in names)

    @pytest.mark.parametrize("params", [EVERYTHING, SamplingParams(), ZEROS], ids=["all", "none", "zeros"])
    def test_round_trip(self, params: SamplingParams) -> None:
        """Zero is not unset."""
        request = over_the_wire(client_wire.generate_request("x", params))
        assert client_wire.generate_params(request) == params

    def test_an_empty_message_means_the_defaults(self) -> None:
        assert client_wire.generate_params(generation_pb2.GenerateRequest(text="x")) == SamplingParams()

    def test_a_model_service_gets_the_sampling_parameters(self) -> None:
        opened = wire.opened_params(over_the_wire(wire.open_sequence(EVERYTHING, 3, 7)))
        of_sampling = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
        for field in dataclasses.fields(SamplingParams):
            is_sent = field.name in ("stop_token_ids", "cache_salt") or field.name in of_sampling
            expected = EVERYTHING if is_sent else SamplingParams(max_tokens=None)
            assert getattr(opened, field.name) == getattr(expected, field.name)

    def test_it_gets_the_tokens_that_end_an_output_where_it_must_exclude_them(self) -> None:
        params = SamplingParams(stop_token_ids=(4, 5), seed=1, rule=Rule.GUMBEL)
        assert wire.opened_params(wire.open_sequence(params, 3)).stop_token_ids == ()

    @pytest.mark.parametrize("rule", [5, -1, 2**31 - 1])
    def test_an_unknown_rule(self, rule: int) -> None:
        message = common_pb2.OpenSequence(sampling={"seed": 1, "rule": rule}, prompt_len=1)
        with pytest.raises(InvalidRequestError, match=f"rule={rule}"):
            wire.opened_params(message)

    @pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
    def test_every_grammar(self, grammar: Grammar) -> None:
        params = SamplingParams(grammar=grammar, seed=1, rule=Rule.GUMBEL)
        assert wire.opened_params(over_the_wire(wire.open_sequence(params, 3))).grammar == grammar

    def test_a_grammar_of_nothing(self) -> None:
        message = common_pb2.SamplingParams(grammar=common_pb2.Grammar())
        with pytest.raises(InvalidRequestError, match="grammar=unset"):
            wire.sampling_from_proto(message)


class TestPrompts:
    def test_forms(self) -> None:
        params = SamplingParams()
        assert client_wire.generate_request("", params).WhichOneof("prompt") == "text"
        assert client_wire.generate_request(None, params, []).WhichOneof("prompt") == "token_ids"
        assert list(client_wire.generate_request(None, params, (1, 2)).token_ids.ids) == [1, 2]
        request = client_wire.generate_request(None, params, None, SAID)
        assert [(m.role, m.content) for m in request.messages.messages] == [("user", "hi")]

    @pytest.mark.parametrize("forms", [(None, None, None), ("x", [1], None), (None, [1], []), ("", [], [])])
    def test_exactly_one(self, forms: Any) -> None:
        prompt, token_ids, messages = forms
        with pytest.raises(InvalidRequestError, match="exactly one"):
            client_wire.generate_request(prompt, SamplingParams(), token_ids, messages)

    @pytest.mark.parametrize("bad", [-1, 2**31, 1.0, "3", None])
    def test_ids(self, bad: Any) -> None:
        with pytest.raises(InvalidRequestError, match=r"prompt_token_ids\[1\]="):
            client_wire.generate_request(None, SamplingParams(), [1, bad])

    def test_what_a_template_reads_besides(self) -> None:
        called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "é"}}]}
        request = client_wire.generate_request(
            None, SamplingParams(), None, [called], chat_template_kwargs={"enable_thinking": False}
        )
        [sent] = over_the_wire(request).messages.messages
        assert client_wire.message_from_proto(0, sent) == called
        kwargs = client_wire.object_from_json("chat_template_kwargs", request.messages.template_kwargs)
        assert kwargs == {"enable_thinking": False}

    def test_fields_that_replace_others(self) -> None:
        message = generation_pb2.Message(role="user", other_fields='{"role": "system"}')
        with pytest.raises(InvalidRequestError, match=r"messages\[2\]="):
            client_wire.message_from_proto(2, message)

    @pytest.mark.parametrize("text", ["[1]", "1", "{", "[" * 100_000])
    def test_objects_and_tools_on_the_wire(self, text: str) -> None:
        with pytest.raises(InvalidRequestError, match="name="):
            client_wire.object_from_json("name", text)
        with pytest.raises(InvalidRequestError, match="tools="):
            client_wire.tools_from_json(text)

    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            *(("chat_template_kwargs", bad) for bad in ([1], {1: 2}, {"x": float("nan")}, {"x": object()})),
            *(("tools", bad) for bad in ({"a": 1}, [1], [{"x": float("nan")}], [{"x": object()}])),
        ],
    )
    def test_what_is_not_json(self, name: str, bad: Any) -> None:
        with pytest.raises(InvalidRequestError, match=f"{name}="):
            client_wire.generate_request(None, SamplingParams(), None, SAID, **{name: bad})

    @pytest.mark.parametrize("bad", [{"role": "user"}, {"role": "user", "content": 3}, "hi", {}])
    def test_messages(self, bad: Any) -> None:
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]="):
            client_wire.generate_request(None, SamplingParams(), None, [bad])

    def test_tools(self) -> None:
        tools = [{"type": "function", "function": {"name": "é"}}]
        request = client_wire.generate_request(None, SamplingParams(), None, SAID, tools=tools)
        assert client_wire.tools_from_json(request.messages.tools) == tools
        assert client_wire.tools_from_json("") == []

    def test_tools_without_a_conversation(self) -> None:
        with pytest.raises(InvalidRequestError, match="only for messages"):
            client_wire.generate_request("x", SamplingParams(), tools=[{}])


class TestColumns:
    def test_part_of_an_entry(self) -> None:
        with pytest.raises(InvalidRequestError, match="probs=5 bytes: is not a whole number of 4-byte"):
            columns.unpack("probs", b"12345", None, "<f4")

    def test_parents(self) -> None:
        """Chains are spelt out beside trees, and nothing is sent where all are chains."""
        chain, tree = Proposal(5, [1, 2]), Proposal(5, [1, 2], parents=[-1, -1])
        assert not proposals.to_proto([chain, chain]).parent_indices
        sent = proposals.to_proto([chain, tree])
        assert list(sent.parent_indices) == [255, 0, 255, 255]
        found = proposals.from_proto(sent, [5, 5], vocab_size=9)
        assert [list(each.parents) for each in found] == [[], [-1, -1]]

    def test_loads_are_not_negative(self) -> None:
        with pytest.raises(InvalidRequestError, match="load=-1: must be at least 0"):
            wire.load_from_proto(wire.load_to_proto(Load(1, 2, 3, -1, 5)))

    def test_timings(self) -> None:
        sent = [SPENT, Timings(6, 7, 8, 9, 10)]
        message = over_the_wire(columns.timings_to_proto(sent))
        assert columns.timings_from_proto(message, 2) == sent
        assert columns.timings_from_proto(columns.timings_to_proto([]), 0) == []


SUPPORT = Support(np.array([7, 9]), np.array([0.25, 0.75], dtype=np.float32))
CHAIN = Proposal(5, [7, 9], [SUPPORT, SUPPORT])
SPENT = Timings(1, 2, 3, 4, 5)
TREE = Proposal(8, [1, 2], parents=[-1, -1])


class TestModelServices:
    """All that a message carries, both ways."""

    OPENING = common_pb2.OpenSequence(sequence_id=4, prompt_len=3)

    def test_requests_to_draft(self) -> None:
        orders = [
            DraftOrder(4, 1, 0, [1, 2, 3], 5, 0, None, "t"),
            DraftOrder(2, 9, 7, [], 0, 0, Preparation(8, 4, 2), ""),
            DraftOrder(3, 2, 5, [6], 8, 3),
        ]
        message = over_the_wire(draft_wire.request_to_proto([self.OPENING], [1], orders))
        assert draft_wire.orders_from_proto(message) == orders
        assert (list(message.open), list(message.close)) == ([self.OPENING], [1])

    def test_requests_to_verify(self) -> None:
        """Supports are not padded, and without draft probabilities."""
        certain_of_8 = Support(np.array([8]), np.ones(1, np.float32))
        orders = [
            VerifyOrder(4, 1, 0, [1, 2, 3], Proposal(3, [])),
            VerifyOrder(2, 9, 7, [5], Proposal(8, [7, 8], [SUPPORT, certain_of_8], support_len=2), "t"),
            VerifyOrder(3, 2, 5, [6], Proposal(6, [1, 2, 3], parents=[-1, -1, 1]), ahead_id=4),
        ]
        message = over_the_wire(verify_wire.request_to_proto([self.OPENING], [1], orders))
        first, second, third = verify_wire.orders_from_proto(message, 1000)
        assert first == orders[0]._replace(proposal=Proposal(3, [], parents=[]))
        assert third == orders[2]
        assert second._replace(proposal=Proposal(8)) == orders[1]._replace(proposal=Proposal(8))
        assert (second.proposal.base_len, second.proposal.token_ids) == (8, [7, 8])
        assert [each.token_ids.tolist() for each in second.proposal.supports] == [[7, 9], [8]]
        assert [each.probs.tolist() for each in second.proposal.supports] == [[], [1.0]]

    def test_answers_of_the_draft(self) -> None:
        answers = [DraftAnswer(4, 1, CHAIN, SPENT, 6, True), DraftAnswer(2, 9, TREE, Timings())]
        ahead = [PreparedAnswer(2, [4, 5], TREE, 9, 2**40, 77, "t")]
        message = over_the_wire(draft_wire.response_to_proto(answers, ahead, [], "i", 2))
        first, second = draft_wire.answers_from_proto(message, 1000)
        assert [first._replace(proposal=CHAIN), second] == answers
        assert (first.proposal.base_len, first.proposal.token_ids) == (5, [7, 9])
        (prepared,) = draft_wire.prepared_from_proto(message.prepared, 1000)
        assert prepared == ahead[0]

    def test_answers_of_verify(self) -> None:
        entry = Logprobs(np.array([3, 8]), np.array([-0.5, -1.5], dtype=np.float32), 1)
        judged = Verdict(9, [4, 6], [np.array([0.875], dtype=np.float32)], [0.125], [entry, entry])
        load = Load(1, 2, 3, 4, 5)
        answers = [
            VerifyAnswer(4, 1, judged, SPENT, 6, load=load),
            VerifyAnswer(2, 9, Verdict(3, [7]), Timings(), 0, 3, Continuation(4, Outcome([0], 5)), load),
        ]
        message = over_the_wire(verify_wire.response_to_proto(answers, [], load, "i"))
        got = verify_wire.answers_from_proto(message, 64)
        assert [each._replace(verdict=judged) for each in got] == [
            each._replace(verdict=judged) for each in answers
        ]
        first, second = (each.verdict for each in got)
        assert (first.base_len, first.target_token_ids, [*first.tail_mass]) == (9, [4, 6], [0.125])
        assert first.target_probs[0].tolist() == [0.875]
        assert first.logprobs[1].of(8) == -1.5
        assert first.logprobs[1].top() == [(8, -1.5)]
        assert (second.base_len, second.target_token_ids) == (3, [7])
        assert [*second.target_probs, *second.tail_mass, *second.logprobs] == []


def test_model_info_round_trip() -> None:
    """With all that is optional, and without."""
    told = {
        "learning": filled(Learning),
        "costs": filled(Load),
        "adapters": {"mine": "hash"},
        "sampling": {"top_k": 3},
    }
    for sent in (filled(ModelInfo, **told), ModelInfo(name="m", vocab_size=9, context_len=8)):
        assert wire.model_info_from_proto(over_the_wire(wire.model_info_to_proto(sent))) == sent


@pytest.mark.parametrize("stop_reason", [None, "x", "", 0, 5])
def test_completion_and_chunk_round_trip(stop_reason: str | int | None) -> None:
    tokens = tuple(
        Token(token_id=i, text=f"t{i}", fate=fate, source="s", logprob=-0.5, top_logprobs=((1, -0.25),))
        for i, fate in enumerate(Fate)
    )
    text = "".join(token.text for token in tokens)
    held = tuple(dataclasses.replace(token, text="") for token in tokens[2:])
    rejected = Token(token_id=7, text="no", fate=Fate.REJECTED, source="other")
    chunk = Chunk(text=text, tokens=tokens, rejected=(rejected,), first_index=6, held=held)
    sent_chunk = message_of(tokens, held, chunk.rejected, first_index=6)
    got = client_wire.chunk_from_proto(over_the_wire(sent_chunk))
    assert got == chunk
    sent = Completion(
        text=chunk.text,
        token_ids=tuple(range(len(tokens))),
        finish_reason=FinishReason.STOP,
        usage=filled(Usage),
        speculation=filled(Speculation, by_source=(filled(SourceCounts), SourceCounts(source="ngram"))),
        timing=filled(Timing),
        stop_reason=stop_reason,
        seed=2**63 - 1,
        model="m",
        tokens=tokens,
        num_resumes=2,
        hypotheses=(
            filled(Hypothesis, finish_reason=FinishReason.STOP, stop_reason=2),
            filled(Hypothesis, finish_reason=FinishReason.LENGTH, stop_reason=None),
        ),
    )
    received = over_the_wire(client_wire.completion_to_proto(sent))
    assert client_wire.completion_from_proto(received, got.tokens, 2) == sent


ARGUMENTS: dict[type[SpecwireError], tuple[Any, ...]] = {
    errors.InvalidRequestError: ("top_p", 2.0, "must lie in (0, 1]"),
    errors.ContextLengthError: ("max_tokens", 9, "over the context of 8"),
    errors.UnsupportedError: ("stop", ["x"], "no tokenizer"),
    errors.PrefixMismatchError: (7, 3),
}
"""Of those that are not made of what they say."""
ERRORS = [
    errors.ResourceExhaustedError("full", 20),
    *(
        kind(*ARGUMENTS.get(kind, ("what happened",)))
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, SpecwireError) and kind is not SpecwireError
    ),
]
"""One of each kind, and one that says when to try again."""


@pytest.mark.parametrize("name", ["finish_reason", "rule"])
def test_what_a_later_version_says_is_refused_by_name(name: str) -> None:
    message = generation_pb2.Completion(finish_reason=1, rule=1)  # type: ignore[arg-type]
    setattr(message, name, 99)
    with pytest.raises(InternalError, match=f"{name} 99 of the coordinator is not known"):
        client_wire.completion_from_proto(message, [])


class TestErrors:
    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    def test_the_peer_raises_the_same(self, error: SpecwireError) -> None:
        """What ends a sequence of many in a stream, and what ends a call."""
        of_sequence = columns.error_from_proto(over_the_wire(columns.error_to_proto(3, error)))
        status = to_status(error)

        class ReceivedError(Exception):
            code = staticmethod(lambda: status.code)
            details = staticmethod(lambda: status.details)
            trailing_metadata = staticmethod(lambda: status.trailing_metadata)

        for got in (of_sequence, from_rpc_error(ReceivedError())):
            assert (type(got), str(got), got.details()) == (type(error), str(error), error.details())
        assert status.code.name == error.status
