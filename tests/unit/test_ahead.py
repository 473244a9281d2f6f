"""What a target goes on with by itself, and what the coordinator remembers of it: pure, and over the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specwire.core import (
    Continuation,
    Load,
    Outcome,
    Proposal,
    Rule,
    SamplingParams,
    Timings,
    Verdict,
)
from specwire.errors import InvalidRequestError
from specwire.proposals.prepared import PreparedProposals
from specwire.rpc.wire import verify as wire
from specwire.rpc.wire.verify import AheadOrder, VerifyAnswer, VerifyOrder
from specwire.rule import acceptance
from specwire.support import Support
from specwire.v1 import verify_pb2
from verify_service.ahead import MAX_AHEAD, MAX_AHEAD_ENTRIES, Ahead, Next

GREEDY = SamplingParams(temperature=0, seed=1)
SAMPLED = SamplingParams(seed=1, rule=Rule.REJECTION)
VOCAB_SIZE = 64
PROMPT = [1, 2, 3]


def ahead(ahead_id: int, path: Sequence[int], *token_ids: int, base_len: int = 3) -> AheadOrder:
    return AheadOrder(7, ahead_id, path, Proposal(base_len, list(token_ids)))


def support(*token_ids: int) -> Support:
    probs = np.full(len(token_ids), 1 / len(token_ids), np.float32)
    return Support(np.array(token_ids), probs)


def following(own: Ahead, proposal: Proposal, verdict: Verdict) -> Next:
    found = own.after(proposal, verdict)
    assert found is not None
    return found


@pytest.fixture
def own() -> Ahead:
    made = Ahead(GREEDY)
    made.commit(0, PROMPT)
    return made


class TestAhead:
    """The target said 8, 9 and 5 to the draft tokens 8 and 9."""

    PROPOSAL, VERDICT = Proposal(3, [8, 9]), Verdict(3, [8, 9, 5])

    def test_what_follows_the_outcome_is_next(self, own: Ahead) -> None:
        own.add(ahead(1, [8, 6], 30))
        own.add(ahead(2, [8, 9, 5], 20, 21))
        found = following(own, self.PROPOSAL, self.VERDICT)
        assert found.continuation == Continuation(2, Outcome(range(2), 5))
        assert list(found.token_ids) == [8, 9, 5]
        assert (found.proposal.base_len, list(found.proposal.token_ids)) == (6, [20, 21])

    def test_it_goes_on_again_and_again(self, own: Ahead) -> None:
        own.add(ahead(1, [8, 9, 5], 20))
        own.add(ahead(2, [8, 9, 5, 20, 6], 30, 31))
        first = following(own, self.PROPOSAL, self.VERDICT)
        second = following(own, first.proposal, Verdict(6, [20, 6]))
        assert (second.continuation.ahead_id, second.proposal.base_len) == (2, 8)

    @pytest.mark.parametrize("path", [[8, 9, 4], [8, 9, 5, 20], [7]])
    def test_nothing_follows(self, own: Ahead, path: list[int]) -> None:
        own.add(ahead(1, path, 20))
        assert own.after(self.PROPOSAL, self.VERDICT) is None

    def test_a_request_replaces_what_it_came_to(self, own: Ahead) -> None:
        own.add(ahead(1, [8, 9, 5], 20))
        own.add(ahead(2, [8, 9, 6, 22], 30))
        following(own, self.PROPOSAL, self.VERDICT)
        own.commit(3, [8, 9, 6])
        dropped = own.after(Proposal(6, [22]), Verdict(6, [22, 7]))
        assert dropped is None, "with the first outcome"
        own.commit(6, [22])
        own.add(ahead(3, [11], 40, base_len=7))
        assert following(own, Proposal(7), Verdict(7, [11])).continuation.ahead_id == 3

    def test_a_verdict_on_other_tokens_than_it_knows_starts_nothing(self, own: Ahead) -> None:
        own.add(ahead(1, [8, 9, 5], 20))
        assert own.after(Proposal(4, [9]), Verdict(4, [9, 5])) is None

    def test_a_tree(self, own: Ahead) -> None:
        """Two children of the prefix; the target follows the second."""
        tree = Proposal(3, [8, 9, 5, 6], parents=[-1, -1, 1, 1])
        own.add(AheadOrder(7, 1, [9], Proposal(3, [5, 6, 20, 21, 30], parents=[-1, -1, 1, 1, 2])))
        found = following(own, tree, Verdict(3, [9, 0, 6, 0, 20]))
        assert found.continuation.outcome == Outcome([1, 3], 20)
        assert (found.proposal.base_len, list(found.proposal.token_ids)) == (6, [30])

    def test_the_rule_is_the_coordinators(self) -> None:
        """Rejection sampling: same proposal, verdict, parameters and seed, so the same outcome."""
        for seed in range(20):
            params = SamplingParams(seed=seed, rule=Rule.REJECTION)
            made = Ahead(params)
            made.commit(0, PROMPT)
            for ahead_id, path in enumerate([[8, 9], [8, 5], [4], [8, 4], [9]], start=1):
                made.add(AheadOrder(7, ahead_id, path, Proposal(3, [20], [support(20, 21)])))
            proposal = Proposal(3, [8], [support(8, 9)])
            probs = np.array([0.3, 0.4], np.float32)
            verdict = Verdict(3, [4, 9], [probs], [0.3])
            outcome = acceptance.accept(proposal, verdict, params, seed)
            assert following(made, proposal, verdict).continuation.outcome == outcome

    def test_it_keeps_a_bounded_number(self, own: Ahead) -> None:
        for ahead_id in range(1, 3 * MAX_AHEAD):
            own.add(ahead(ahead_id, [8, 9, 5], 20))
        assert len(own._prepared._arrived) == MAX_AHEAD

    def test_and_their_supports_are_bounded_too(self) -> None:
        """The oldest ones are dropped, and one that is too large by itself."""
        made = Ahead(SAMPLED)
        kept = []
        for ahead_id, num in enumerate([1, 1, 1, 3], start=1):
            padded = Proposal(3, [20] * num, [support(20)] * num, support_len=MAX_AHEAD_ENTRIES // 2)
            made.add(AheadOrder(7, ahead_id, [8], padded))
            kept.append([each.origin for each in made._prepared._arrived])
        assert kept == [[1], [1, 2], [2, 3], []]


class TestRemembered:
    """What the coordinator knows of the proposals that it sent ahead."""

    @pytest.fixture
    def sent(self) -> PreparedProposals:
        made = PreparedProposals(4)
        made.add([8, 9], Proposal(3, [20, 21]), 1)
        made.add([8, 9], Proposal(3, [20, 21, 22]), 2)
        made.add([8, 9, 20, 21, 5], Proposal(3, [30]), 3)
        return made

    def test_one_is_found_by_its_number(self, sent: PreparedProposals) -> None:
        assert sent.find(1, [*PROMPT, 8, 9]) == Proposal(5, [20, 21]), "and not the longest"
        assert sent.find(2, [*PROMPT, 8, 9, 20]) == Proposal(6, [21, 22])

    @pytest.mark.parametrize(
        ("number", "committed"), [(9, [8, 9]), (0, [8, 9]), (1, [8]), (1, [8, 7]), (3, [8, 9]), (1, [])]
    )
    def test_none_is_found(self, sent: PreparedProposals, number: int, committed: list[int]) -> None:
        assert sent.find(number, [*PROMPT, *committed]) is None

    def test_it_keeps_what_may_be_used_later(self, sent: PreparedProposals) -> None:
        assert sent.find(0, [*PROMPT, 8, 9]) is None
        assert sent.find(3, [*PROMPT, 8, 9, 20, 21, 5]) is not None
        assert [each.origin for each in sent._arrived] == [3], "those that do not follow are dropped"

    def test_over_its_limit_the_oldest_is_dropped(self, sent: PreparedProposals) -> None:
        for number in (4, 5):
            sent.add([8], Proposal(3, [7]), number)
        assert sent.find(1, [*PROMPT, 8, 9]) is None


def received(*orders: VerifyOrder | AheadOrder) -> verify_pb2.VerifyRequest:
    sent = wire.request_to_proto([], [], orders)
    return verify_pb2.VerifyRequest.FromString(sent.SerializeToString())


def answered(*answers: VerifyAnswer) -> verify_pb2.VerifyResponse:
    sent = wire.response_to_proto(answers, [], Load(), "me")
    return verify_pb2.VerifyResponse.FromString(sent.SerializeToString())


class TestColumns:
    """A round trip changes nothing: the rule comes to the same on both sides."""

    def test_proposals_ahead(self) -> None:
        orders = [
            ahead(1, [8, 9], 20, 21),
            AheadOrder(8, 5, [], Proposal(9, [4, 6, 7], parents=[-1, -1, 1])),
            AheadOrder(9, 2, [3], Proposal(0, [5, 6], [support(5, 8, 9), support(6)], support_len=4)),
            AheadOrder(9, 3, [4], Proposal(1, [5], [support(5, 8)], support_len=4)),
        ]
        found = wire.ahead_from_proto(received(*orders).ahead, VOCAB_SIZE)
        for one, other in zip(found, orders, strict=True):
            assert one[:3] == other[:3]
            ours, theirs = one.proposal, other.proposal
            assert (ours.base_len, ours.token_ids) == (theirs.base_len, theirs.token_ids)
            assert list(ours.parents) == list(theirs.parents)
            for our, their in zip(ours.supports, theirs.supports, strict=True):
                np.testing.assert_array_equal(our.token_ids, their.token_ids)
                np.testing.assert_array_equal(our.probs, their.probs)

    def test_their_size_does_not_depend_on_their_tokens(self) -> None:
        """Or the moment of their arrival would, and with it which of them is judged."""
        sizes = {
            received(AheadOrder(9, 2, [3], Proposal(3, [5], [each], support_len=8))).ByteSize()
            for each in (support(5), support(5, 6, 7), support(*range(8)))
        }
        assert len(sizes) == 1

    def test_continuations(self) -> None:
        answers = [
            VerifyAnswer(1, 4, Verdict(3, [8, 9]), Timings(), 0, 0, Continuation(6, Outcome([0, 2], 9))),
            VerifyAnswer(2, 0, Verdict(3, [8]), Timings(), 0, 11),
            VerifyAnswer(3, 5, Verdict(3, [8]), Timings(), 0, 0, Continuation(7, Outcome([], 63))),
        ]
        message = answered(*answers)
        found = wire.answers_from_proto(message, VOCAB_SIZE)
        assert [each.ahead_id for each in found] == [0, 11, 0]
        assert [each.continuation for each in found] == [each.continuation for each in answers]
        message.continuations.num_accepted[0] = 3
        with pytest.raises(InvalidRequestError, match="path"):
            wire.answers_from_proto(message, VOCAB_SIZE)

    def test_proposals_of_the_service_itself(self) -> None:
        """They follow the outcome, whether the service goes on with them or waits."""
        tree, chain = Proposal(6, [7, 8, 9], parents=[-1, -1, 0]), Proposal(4, [5])
        begun, waits = Continuation(-2, Outcome([0, 1], 2)), Continuation(0, Outcome([], 8))
        answers = [
            VerifyAnswer(1, 4, Verdict(3, [8, 9, 1]), Timings(), 0, 0, begun, proposal=tree),
            VerifyAnswer(2, 5, Verdict(3, [8]), Timings(), 0, 0, waits, proposal=chain),
            VerifyAnswer(3, 6, Verdict(3, [8]), Timings(), 0),
        ]
        message = answered(*answers)
        found = wire.answers_from_proto(message, VOCAB_SIZE)
        assert [each.proposal for each in found] == [tree, replace(chain, parents=[]), None]
        assert [each.continuation for each in found] == [begun, waits, None]
        with pytest.raises(InvalidRequestError, match="token_ids"):
            wire.answers_from_proto(message, 9)
        message.next.support_lens = bytes(4)
        with pytest.raises(InvalidRequestError, match="support_lens"):
            wire.answers_from_proto(message, VOCAB_SIZE)
        message.ClearField("continuations")
        with pytest.raises(InvalidRequestError, match="ahead_ids"):
            wire.answers_from_proto(message, VOCAB_SIZE)
