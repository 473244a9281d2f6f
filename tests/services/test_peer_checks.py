"""What a peer sends is checked first: a broken draft is a lost draft, a broken target is failed over."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from coordinator.peers.checks import check_proposal, check_verdict
from coordinator.peers.link import draft_codec, verify_codec
from coordinator.peers.verifier import _MAX_AHEAD, _VerifySequence
from specwire import (
    Completion,
    InvalidRequestError,
    ResourceExhaustedError,
    Rule,
    SamplingParams,
    ServiceUnavailableError,
)
from specwire.core import Load, Logprobs, Proposal, Timings, Verdict, Wanted
from specwire.errors import InternalError
from specwire.rpc.wire import columns
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import verify as verify_wire
from specwire.rpc.wire.draft import DraftAnswer, PreparedAnswer
from specwire.rpc.wire.verify import VerifyAnswer
from specwire.support import Support
from specwire.v1 import common_pb2
from tests.support.harness import LocalStack, local_stack
from tests.support.mutations import mutated_message

VOCAB_SIZE = 8
PROMPT = [3, 1, 4]
TARGET, DRAFT = "emulated:step_ms=0", "emulated:step_ms=0,alpha=0.8"


def support(ids: list[int], probs: list[float]) -> Support:
    return Support(np.array(ids, np.int64), np.array(probs, np.float32))


TWO = (support([1, 2], [0.5, 0.5]), support([3], [1.0]))
PROPOSAL = Proposal(5, [1, 3], TWO)
VERDICT = Verdict(
    5, [7, -1, 4], [np.array([0.25, 0.5], np.float32), np.array([1.0], np.float32)], [0.25, 0.0]
)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


BAD_VERDICTS: dict[str, dict[str, Any]] = {
    "another base": {"base_len": 6},
    "a position too few": {"target_token_ids": [7, -1]},
    "a bonus token beyond the vocabulary": {"target_token_ids": [7, -1, 8]},
    "no bonus token": {"target_token_ids": [7, -1, -1]},
    "a tail token beyond the vocabulary": {"target_token_ids": [99, -1, 4]},
    "no tail token where there is mass": {"target_token_ids": [-1, -1, 4]},
    "probabilities of another support": {"target_probs": VERDICT.target_probs[::-1]},
    "a tail mass that is no number": {"tail_mass": [float("nan"), 0.0]},
    "a negative tail mass": {"tail_mass": [0.25, -0.5]},
    "a sum above one": {"tail_mass": [0.5, 0.0]},
    "log probabilities of a position too few": {"logprobs": [Logprobs(np.array([7]), np.array([-1.0]), 0)]},
}


BESIDE = Proposal(5, [1, 3])
"""Of another sequence, where tokens are matched."""
REFUSALS = (InternalError, InvalidRequestError)
"""Both end the stream, as `Link` has it."""


def received_proposal(proposal: Proposal, *, matches_tokens: bool, may_be_tree: bool = False) -> Proposal:
    """After all checks, in a message with another one."""
    answers = [
        DraftAnswer(number, 1, each, Timings()) for number, each in enumerate((BESIDE, proposal, PROPOSAL))
    ]
    message = draft_wire.response_to_proto(answers, [], [], "i", support_len=3)
    found = dict(draft_codec(VOCAB_SIZE).decode(over_the_wire(message)))
    assert [*found[0].proposal.token_ids] == BESIDE.token_ids
    received: Proposal = found[1].proposal
    check_proposal(received, matches_tokens=matches_tokens, may_be_tree=may_be_tree)
    return received


class TestProposals:
    """What else none may be: `TestRawVerify` of `test_bad_input`; the same function reads them."""

    def test_supports_where_tokens_are_matched(self) -> None:
        with pytest.raises(InternalError, match="2 supports for 0"):
            received_proposal(PROPOSAL, matches_tokens=True)

    def test_a_tree_where_chains_were_asked_for(self) -> None:
        tree = Proposal(5, [1, 3], parents=[-1, -1])
        assert received_proposal(tree, matches_tokens=True, may_be_tree=True).parents == [-1, -1]
        with pytest.raises(InternalError, match="a tree of 2 nodes"):
            received_proposal(tree, matches_tokens=True)


def received_verdict(verdict: Verdict, proposal: Proposal) -> Verdict:
    """After all checks, in a message with others."""
    each = (Verdict(5, [3]), verdict, VERDICT)
    answers = [VerifyAnswer(number, 1, one, Timings(), 0) for number, one in enumerate(each)]
    message = verify_wire.response_to_proto(answers, [], Load(), "i")
    found = dict(verify_codec(VOCAB_SIZE).decode(over_the_wire(message)))
    assert found[0].verdict.target_token_ids == [3]
    received: Verdict = found[1].verdict
    check_verdict(received, proposal)
    return received


class TestVerdicts:
    @pytest.mark.parametrize("changes", BAD_VERDICTS.values(), ids=BAD_VERDICTS)
    def test_bad_ones(self, changes: dict[str, Any]) -> None:
        with pytest.raises(REFUSALS):
            received_verdict(dataclasses.replace(VERDICT, **changes), PROPOSAL)

    def test_a_matched_token_beyond_the_vocabulary(self) -> None:
        with pytest.raises(InvalidRequestError, match="target_token_ids=8"):
            received_verdict(Verdict(5, [0, 8, 4]), Proposal(5, [1, 3]))

    def test_log_probabilities_without_the_draft_token(self) -> None:
        entries = [
            Logprobs(np.array(ids), np.full(len(ids), -1.0, np.float32), 0) for ids in ([7, 1], [2], [4])
        ]
        with pytest.raises(InternalError, match="lack a token"):
            received_verdict(dataclasses.replace(VERDICT, logprobs=entries), PROPOSAL)


def changed_at_random(message: Any, decode: Callable[[Any], Any]) -> set[str]:
    """What becomes of changed messages: decoded, or refused."""
    draws, endings = random.Random(16), set()
    for _ in range(500):
        mutant = mutated_message(message, draws)
        try:
            list(decode(mutant))
            endings.add("decoded")
        except REFUSALS:
            endings.add("refused")
    return endings


def test_no_message_of_a_peer_is_a_defect_here() -> None:
    """Whatever its columns hold, it is decoded or refused."""
    answers = [DraftAnswer(1, 1, PROPOSAL, Timings()), DraftAnswer(2, 1, BESIDE, Timings())]
    ahead = [PreparedAnswer(1, [4, 2], PROPOSAL, 1, 5, 6)]
    failed = [columns.error_to_proto(3, ResourceExhaustedError("full", 7))]
    drafted = draft_wire.response_to_proto(answers, ahead, failed, "i", support_len=3)
    assert changed_at_random(drafted, draft_codec(VOCAB_SIZE).decode) == {"decoded", "refused"}
    entries = [Logprobs(np.array([7, 1]), np.full(2, -1.0, np.float32), 1)] * 3
    verdicts = [dataclasses.replace(VERDICT, logprobs=entries), Verdict(5, [3])]
    judged = [VerifyAnswer(number, 1, each, Timings(), 0) for number, each in enumerate(verdicts)]
    verified = verify_wire.response_to_proto(judged, failed, Load(1, 2, 3, 4, 5), "i")
    assert changed_at_random(verified, verify_codec(VOCAB_SIZE).decode) == {"decoded", "refused"}


# --- over the wire: real services whose messages are changed as they leave ---------------------------


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    options = {"failover_timeout_s": 0.3}
    with local_stack(TARGET, DRAFT, coordinator_options=options) as running:
        yield running


def changed(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, change: Callable[[Any], None]) -> None:
    """From now on, the messages that this function makes are changed."""
    convert = getattr(module, name)

    def changing(*args: Any, **kwargs: Any) -> Any:
        message = convert(*args, **kwargs)
        change(message)
        return message

    monkeypatch.setattr(module, name, changing)


def params(rule: Rule) -> SamplingParams:
    return SamplingParams(max_tokens=24, rule=rule, seed=3, max_depth=0)


def generate(stack: LocalStack, rule: Rule) -> Completion:
    return stack.client.generate(prompt_token_ids=PROMPT, params=params(rule))


def no_number(message: Any) -> None:
    message.support_probs = b"\0\0\xc0\x7f" * (len(message.support_probs) // 4)


def unknown_tokens(message: Any) -> None:
    message.token_ids = b"\xff\xff\xff\x7f" * (len(message.token_ids) // 4)


def of_proposals(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """All proposals of a message of the draft service."""

    def change_all(message: Any) -> None:
        change(message.proposals)
        if message.HasField("prepared"):
            change(message.prepared.proposals)

    return change_all


def of_parents(*parents: int) -> Callable[[Any], None]:
    """As many tokens with these parents."""

    def change(message: Any) -> None:
        num = len(message.num_tokens)
        message.num_tokens[:] = [len(parents)] * num
        message.token_ids = columns.pack([[1] * len(parents)] * num, "<i4")
        message.parent_indices = columns.pack([parents] * num, "<i1")

    return change


@pytest.mark.parametrize(
    ("rule", "change"),
    [(Rule.REJECTION, no_number), (Rule.GUMBEL, unknown_tokens), (Rule.GUMBEL, of_parents(-1, -1))],
    ids=["nan", "ids", "a tree that was not asked for"],
)
def test_a_broken_draft_is_a_lost_draft(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, rule: Rule, change: Callable[[Any], None]
) -> None:
    """The request goes on without it; one is not charged with what the draft did."""
    sound = generate(stack, rule)
    assert sound.speculation.num_accepted_tokens
    changed(monkeypatch, draft_wire, "response_to_proto", of_proposals(change))
    done = generate(stack, rule)
    assert len(done.token_ids) == 24
    assert done.speculation.draft_unavailable
    assert done.speculation.num_accepted_tokens == 0
    if rule is Rule.GUMBEL:
        assert done.token_ids == sound.token_ids


def test_a_tree_that_is_larger_or_deeper_than_asked_is_cut(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was prepared for an earlier plan may be; verify sees what the plan allows."""
    asked = dataclasses.replace(params(Rule.GUMBEL), num_draft_tokens=8, max_depth=3)
    sound = stack.client.generate(prompt_token_ids=PROMPT, params=asked)
    too_large = of_proposals(of_parents(*range(-1, 30), *[29] * 33))
    changed(monkeypatch, draft_wire, "response_to_proto", too_large)
    done = stack.client.generate(prompt_token_ids=PROMPT, params=asked)
    assert done.token_ids == sound.token_ids
    assert done.speculation.draft_unavailable == ""
    assert 0 < done.speculation.num_draft_tokens <= 3 * done.speculation.num_rounds


@pytest.mark.parametrize(
    ("path", "base_len", "problem"),
    [
        ([VOCAB_SIZE], 5, "path_token_ids=8"),
        ([1], -1, "base_lens=-1"),
    ],
)
def test_what_a_prepared_proposal_follows(path: list[int], base_len: int, problem: str) -> None:
    """Refused here: it would be sent on to verify, which would end the generation's sequence."""
    proposal = dataclasses.replace(PROPOSAL, base_len=base_len)
    prepared = PreparedAnswer(1, path, proposal, 1, 5, 6)
    message = over_the_wire(draft_wire.response_to_proto([], [prepared], [], "i", 4))
    with pytest.raises(InvalidRequestError, match=problem):
        list(draft_codec(VOCAB_SIZE).decode(message))


async def test_a_service_that_answers_what_it_was_not_asked() -> None:
    """A bounded number of answers is kept, then the sequence fails."""
    sequence = _VerifySequence(mock.Mock(), common_pb2.OpenSequence(), None)
    for ahead_id in range(1, _MAX_AHEAD + 2):
        sequence.prepare([1], Proposal(3, [4]))
        sequence.received(VerifyAnswer(1, 0, Verdict(3, [4]), Timings(), 0, ahead_id), 1)
    with pytest.raises(ServiceUnavailableError, match="answers what it was not asked"):
        await sequence.ask([1, 2, 3], Proposal(3), "", Wanted())


def beyond(message: Any) -> None:
    message.target_token_ids = b"\xff\xff\xff\x7f" * (len(message.target_token_ids) // 4)


def heavy(message: Any) -> None:
    message.tail_mass = np.full(len(message.tail_mass) // 8, 2.0).tobytes()
    message.target_token_ids = columns.pack([[3] * (len(message.target_token_ids) // 4)], "<i4")


@pytest.mark.parametrize(
    ("rule", "change", "said"),
    [(Rule.GUMBEL, beyond, "outside the vocabulary"), (Rule.REJECTION, heavy, "add up to")],
    ids=["ids", "mass"],
)
def test_a_stranger_at_the_address_of_verify(
    stack: LocalStack,
    monkeypatch: pytest.MonkeyPatch,
    rule: Rule,
    change: Callable[[Any], None],
    said: str,
) -> None:
    """No token of its reaches the client: it is a replica that failed."""
    changed(monkeypatch, verify_wire, "response_to_proto", change)
    with (
        stack.client.stream(prompt_token_ids=PROMPT, params=params(rule)) as stream,
        pytest.raises(ServiceUnavailableError, match=said),
    ):
        next(iter(stream))


def with_another_id(message: Any) -> None:
    for entry in message.logprobs:
        entry.token_ids += b"\xff\xff\xff\xff"
        entry.values += b"\0\0\x80\xbf"  # -1


def without_numbers(message: Any) -> None:
    for entry in message.logprobs:
        entry.values = b"\0\0\xc0\x7f" * (len(entry.values) // 4)


def less_than_nothing_cached(message: Any) -> None:
    message.num_cached_tokens[:] = [-5] * len(message.num_cached_tokens)


def of_another_request(message: Any) -> None:
    message.request_ids[:] = [each + 7 for each in message.request_ids]


def of_no_sequence(message: Any) -> None:
    message.sequence_ids[:] = [each + 1000 for each in message.sequence_ids]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_another_id, "outside the vocabulary"),
        (without_numbers, "logprobs.values=nan"),
        (less_than_nothing_cached, "num_cached_tokens=-5"),
        (of_another_request, "answers what it was not asked"),
        (of_no_sequence, "never opened"),
    ],
)
def test_what_would_reach_the_client_or_be_waited_for_in_vain(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], said: str
) -> None:
    """The replica has failed: no error without a type, nothing that no target says, and no endless wait."""
    changed(monkeypatch, verify_wire, "response_to_proto", change)
    asked = dataclasses.replace(params(Rule.GUMBEL), logprobs=2)
    with pytest.raises(ServiceUnavailableError, match=said):
        stack.client.generate(prompt_token_ids=PROMPT, params=asked, timeout_s=10.0)
