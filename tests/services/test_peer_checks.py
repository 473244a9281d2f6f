"""What a peer sends is checked first: a broken draft is a lost draft, a broken target is failed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from coordinator.peers.checks import check_proposal, check_verdict
from specwire import Completion, Rule, SamplingParams, ServiceUnavailableError
from specwire.core import Logprobs, Proposal, Support, Verdict
from specwire.errors import InternalError
from specwire.wire import model as wire
from tests.support.harness import LocalStack, local_stack

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


def with_first(one: Support) -> Proposal:
    return Proposal(5, [1, 3], (one, TWO[1]))


BAD_PROPOSALS = {
    "an id beyond the vocabulary": Proposal(5, [1, 8], TWO),
    "a negative id": Proposal(5, [1, -2], TWO),
    "a support too few": Proposal(5, [1, 3], TWO[:1]),
    "an id of a support beyond the vocabulary": with_first(support([1, 9], [0.5, 0.5])),
    "an empty support": with_first(support([], [])),
    "a probability that is no number": with_first(support([1, 2], [0.5, float("nan")])),
    "a negative probability": with_first(support([1, 2], [1.5, -0.5])),
    "a probability of zero": with_first(support([1, 2], [1.0, 0.0])),
    "a sum above one": with_first(support([1, 2], [0.9, 0.9])),
    "a sum below one": with_first(support([1, 2], [0.3, 0.3])),
    "a token twice": with_first(support([1, 1], [0.5, 0.5])),
    "a token that was drawn from elsewhere": with_first(support([4, 2], [0.5, 0.5])),
}
BAD_VERDICTS: dict[str, dict[str, Any]] = {
    "another base": {"base_len": 6},
    "a position too few": {"target_token_ids": [7, -1]},
    "a bonus token beyond the vocabulary": {"target_token_ids": [7, -1, 8]},
    "no bonus token": {"target_token_ids": [7, -1, -1]},
    "a tail token beyond the vocabulary": {"target_token_ids": [99, -1, 4]},
    "no tail token where there is mass": {"target_token_ids": [-1, -1, 4]},
    "probabilities of another support": {"target_probs": VERDICT.target_probs[::-1]},
    "a tail mass too few": {"tail_mass": [0.25]},
    "a tail mass that is no number": {"tail_mass": [float("nan"), 0.0]},
    "a negative tail mass": {"tail_mass": [0.25, -0.5]},
    "a sum above one": {"tail_mass": [0.5, 0.0]},
    "log probabilities of a position too few": {"logprobs": [Logprobs(np.array([7]), np.array([-1.0]), 0)]},
}


class TestProposals:
    def test_good_ones(self) -> None:
        check_proposal(PROPOSAL, VOCAB_SIZE, matches_tokens=False)
        check_proposal(Proposal(5), VOCAB_SIZE, matches_tokens=False)
        check_proposal(Proposal(5, [1, 3]), VOCAB_SIZE, matches_tokens=True)

    @pytest.mark.parametrize("proposal", BAD_PROPOSALS.values(), ids=BAD_PROPOSALS)
    def test_bad_ones(self, proposal: Proposal) -> None:
        with pytest.raises(InternalError):
            check_proposal(proposal, VOCAB_SIZE, matches_tokens=False)

    def test_supports_where_tokens_are_matched(self) -> None:
        with pytest.raises(InternalError, match="2 supports for 0"):
            check_proposal(PROPOSAL, VOCAB_SIZE, matches_tokens=True)

    def test_a_tree_where_chains_were_asked_for(self) -> None:
        tree = Proposal(5, [1, 3], parents=[-1, -1])
        check_proposal(tree, VOCAB_SIZE, matches_tokens=True, may_be_tree=True)
        with pytest.raises(InternalError, match="a tree of 2 nodes"):
            check_proposal(tree, VOCAB_SIZE, matches_tokens=True)


class TestVerdicts:
    def test_good_ones(self) -> None:
        check_verdict(VERDICT, PROPOSAL, VOCAB_SIZE, matches_tokens=False)
        check_verdict(Verdict(5, [3]), Proposal(5), VOCAB_SIZE, matches_tokens=False)
        check_verdict(Verdict(5, [0, 7, 4]), Proposal(5, [1, 3]), VOCAB_SIZE, matches_tokens=True)

    @pytest.mark.parametrize("changes", BAD_VERDICTS.values(), ids=BAD_VERDICTS)
    def test_bad_ones(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InternalError):
            check_verdict(dataclasses.replace(VERDICT, **changes), PROPOSAL, VOCAB_SIZE, matches_tokens=False)

    def test_a_matched_token_beyond_the_vocabulary(self) -> None:
        with pytest.raises(InternalError, match="target token 8"):
            check_verdict(Verdict(5, [0, 8, 4]), Proposal(5, [1, 3]), VOCAB_SIZE, matches_tokens=True)

    def test_log_probabilities_without_the_draft_token(self) -> None:
        entries = [Logprobs(np.array(ids), np.full(len(ids), -1.0), 0) for ids in ([7, 1], [2], [4])]
        with pytest.raises(InternalError, match="lack a token"):
            check_verdict(
                dataclasses.replace(VERDICT, logprobs=entries), PROPOSAL, VOCAB_SIZE, matches_tokens=False
            )


# --- over the wire: real services whose messages are changed as they leave ---------------------------


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    options = {"failover_timeout_s": 1.0}
    with local_stack(TARGET, DRAFT, coordinator_options=options) as running:
        yield running


def changed(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], None]) -> None:
    """From now on, what this function of `wire` returns is changed."""
    convert = getattr(wire, name)

    def changing(*args: Any, **kwargs: Any) -> Any:
        message = convert(*args, **kwargs)
        change(message)
        return message

    monkeypatch.setattr(wire, name, changing)


def params(rule: Rule) -> SamplingParams:
    return SamplingParams(max_tokens=24, rule=rule, seed=3)


def generate(stack: LocalStack, rule: Rule) -> Completion:
    return stack.client.generate(prompt_token_ids=PROMPT, params=params(rule))


def no_number(message: Any) -> None:
    for one in message.supports:
        one.probs = np.full(len(one.probs) // 4, np.nan, np.float32).tobytes()


def unknown_tokens(message: Any) -> None:
    message.token_ids[:] = [2**31 - 1] * len(message.token_ids)


@pytest.mark.parametrize(
    ("rule", "change"), [(Rule.REJECTION, no_number), (Rule.GUMBEL, unknown_tokens)], ids=["nan", "ids"]
)
def test_a_broken_draft_is_a_lost_draft(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, rule: Rule, change: Callable[[Any], None]
) -> None:
    """The request goes on without it; one is not charged with what the draft did."""
    sound = generate(stack, rule)
    assert sound.speculation.num_accepted_tokens
    changed(monkeypatch, "proposal_to_proto", change)
    done = generate(stack, rule)
    assert len(done.token_ids) == 24
    assert done.speculation.draft_unavailable
    assert done.speculation.num_accepted_tokens == 0
    if rule is Rule.GUMBEL:
        assert done.token_ids == sound.token_ids


def of_parents(*parents: int) -> Callable[[Any], None]:
    """As many tokens with these parents."""

    def change(message: Any) -> None:
        message.token_ids[:] = [1] * len(parents)
        message.parent_indices[:] = parents

    return change


def with_a_support(message: Any) -> None:
    message.supports.add(token_ids=bytes(4), probs=np.ones(1, np.float32).tobytes())


@pytest.mark.parametrize(
    ("max_depth", "change"),
    [
        (3, of_parents(-1, 2, 0)),
        (3, of_parents(0)),
        (3, of_parents(*[-1] * 65)),
        (3, lambda message: message.parent_indices.append(-1)),
        (3, with_a_support),
        (0, of_parents(-1, -1)),
    ],
    ids=["child first", "its own parent", "65 nodes", "a parent too many", "supports", "unasked"],
)
def test_a_draft_whose_tree_is_none_is_a_lost_draft(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, max_depth: int, change: Callable[[Any], None]
) -> None:
    """Plain decoding goes on to the same text."""
    asked = dataclasses.replace(params(Rule.GUMBEL), num_draft_tokens=8, max_depth=max_depth)
    sound = stack.client.generate(prompt_token_ids=PROMPT, params=asked)
    assert sound.speculation.num_accepted_tokens
    changed(monkeypatch, "proposal_to_proto", change)
    done = stack.client.generate(prompt_token_ids=PROMPT, params=asked)
    assert done.token_ids == sound.token_ids
    assert done.speculation.draft_unavailable
    assert done.speculation.num_draft_tokens == 0


def test_a_tree_that_is_larger_or_deeper_than_asked_is_cut(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was prepared for an earlier plan may be; verify sees what the plan allows."""
    asked = dataclasses.replace(params(Rule.GUMBEL), num_draft_tokens=8, max_depth=3)
    sound = stack.client.generate(prompt_token_ids=PROMPT, params=asked)
    changed(monkeypatch, "proposal_to_proto", of_parents(*range(-1, 30), *[29] * 33))
    done = stack.client.generate(prompt_token_ids=PROMPT, params=asked)
    assert done.token_ids == sound.token_ids
    assert done.speculation.draft_unavailable == ""
    assert 0 < done.speculation.num_draft_tokens <= 3 * done.speculation.num_rounds


def beyond(message: Any) -> None:
    message.target_token_ids[:] = [2**31 - 1] * len(message.target_token_ids)


def heavy(message: Any) -> None:
    message.tail_mass[:] = [2.0] * len(message.tail_mass)
    message.target_token_ids[:] = [3] * len(message.target_token_ids)


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
    changed(monkeypatch, "verdict_to_proto", change)
    with (
        stack.client.stream(prompt_token_ids=PROMPT, params=params(rule)) as stream,
        pytest.raises(ServiceUnavailableError, match=said),
    ):
        next(iter(stream))
