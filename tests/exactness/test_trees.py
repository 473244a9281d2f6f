"""With token trees the text is that of plain decoding: any tree, any draft, and every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specwire import Completion, Rule, SamplingParams
from specwire.core import Proposal
from specwire.rpc.wire import draft as draft_wire
from specwire.v1 import draft_pb2
from tests.support.harness import LocalStack, local_stack
from tests.support.pairs import save_good_draft, save_target
from tests.support.tiny_models import CONTEXT_LEN, FAMILIES, VOCAB_SIZE, WINDOW

PROMPT = [3] * WINDOW + [8, 1, 30, 5, 9, 11, 7]
PROMPT_TEXT = "The quick brown fox"
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
GUMBEL = SamplingParams(rule=Rule.GUMBEL, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, top_p=0.95)
BOTH = pytest.mark.parametrize("params", [GREEDY, GUMBEL], ids=["greedy", "gumbel"])
SIZES = ((1, 1), (8, 3), (64, 10))
"""Nodes and longest path."""


def generate(stack: LocalStack, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> Completion:
    return stack.client.generate(params=params, prompt_token_ids=prompt)


def plain(stack: LocalStack, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> Completion:
    return generate(stack, replace(params, num_draft_tokens=0), prompt)


def with_tree(params: SamplingParams, num_nodes: int, depth: int) -> SamplingParams:
    return replace(params, num_draft_tokens=num_nodes, max_depth=depth)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_of_any_size_on_every_family(tmp_path: Path, family: str) -> None:
    """A draft that is mostly right and prepares outcomes, and a random one of another family without."""
    other = FAMILIES[(FAMILIES.index(family) + 3) % len(FAMILIES)]
    target = save_target(tmp_path / "target", family)
    good = save_good_draft(tmp_path / "good", family)
    hostile = save_target(tmp_path / "hostile", other, seed=9)
    for draft, num_outcomes, sizes in ((good, "8", SIZES), (hostile, "0", [(33, 4)])):
        with local_stack(target, draft, coordinator_options={"num_outcomes": num_outcomes}) as stack:
            for params in (GREEDY, GUMBEL):
                expected = plain(stack, params)
                done = [generate(stack, with_tree(params, *size)) for size in sizes]
                assert {each.token_ids for each in done} == {expected.token_ids}
                assert not any(each.speculation.draft_unavailable for each in done)
                if draft is good:
                    assert done[-1].speculation.num_rounds < NUM_TOKENS // 2
            stack.assert_idle_within(2.0)


# --- trees that the draft service would not propose -------------------------------------------------

Nodes = tuple[list[int], list[int]]
"""Token ids and parents."""


def wrong(token_ids: list[int], parents: list[int]) -> Nodes:
    """Another token at every node."""
    return [(token_id + 1) % VOCAB_SIZE for token_id in token_ids], parents


def with_duplicates(token_ids: list[int], parents: list[int]) -> Nodes:
    """Every node twice among its siblings; the first of the two has no children."""
    half = range(min(len(token_ids), 32))
    doubled = [2 * parents[node] + 1 if parents[node] >= 0 else -1 for node in half]
    return [token_ids[node] for node in half for _ in "12"], [parent for parent in doubled for _ in "12"]


def one_level(_: list[int], __: list[int]) -> Nodes:
    """64 tokens that may come next; nearly always one of them does."""
    return list(range(64)), [-1] * 64


def a_chain_and_a_leaf(token_ids: list[int], _: list[int]) -> Nodes:
    """63 nodes below each other, and one beside the last."""
    return [token_ids[0]] * 64, [*range(-1, 62), 61]


@pytest.mark.sample(3)
@BOTH
@pytest.mark.parametrize("change", [wrong, with_duplicates, one_level, a_chain_and_a_leaf])
def test_any_tree_of_a_sabotaged_draft(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    change: Callable[[list[int], list[int]], Nodes],
) -> None:
    """Bad guesses are no failure: the draft counts as available to the end."""
    convert = draft_wire.response_to_proto

    def sabotaged(proposal: Proposal) -> Proposal:
        if not proposal.token_ids:
            return proposal
        parents = list(proposal.parents) or list(range(-1, len(proposal.token_ids) - 1))
        token_ids, parents = change(list(proposal.token_ids), parents)
        return replace(proposal, token_ids=token_ids, parents=parents)

    def changed(*found: Any) -> draft_pb2.DraftResponse:
        answers, prepared, *others = found
        return convert(
            [each._replace(proposal=sabotaged(each.proposal)) for each in answers],
            [each._replace(proposal=sabotaged(each.proposal)) for each in prepared],
            *others,
        )

    target, draft = save_target(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    with local_stack(target, draft) as stack:
        expected = plain(stack, params)
        monkeypatch.setattr(draft_wire, "response_to_proto", changed)
        done = generate(stack, with_tree(params, 64, 64))
        stack.assert_idle_within(2.0)
    assert done.token_ids == expected.token_ids
    assert done.speculation.num_draft_tokens > NUM_TOKENS
    assert done.speculation.draft_unavailable == ""


# --- parameters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["0", "16"], ids=["requested", "prepared"])
def pair_of_llamas(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    directory = tmp_path_factory.mktemp("trees")
    target, draft = save_target(directory / "target"), save_good_draft(directory / "draft")
    with local_stack(target, draft, coordinator_options={"num_outcomes": request.param}) as running:
        yield running


@pytest.mark.sample(6)
@BOTH
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": -1.0},
        {"logit_bias": {7: 3.0, 12: -100.0}},
        {"top_k": 5, "min_p": 0.01},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_depends_on_the_tokens_before_sees_a_nodes_own_path(
    pair_of_llamas: LocalStack, params: SamplingParams, settings: dict[str, Any]
) -> None:
    params = replace(params, **settings)
    expected = plain(pair_of_llamas, params)
    done = generate(pair_of_llamas, with_tree(params, 24, 5))
    assert done.token_ids == expected.token_ids
    assert done.speculation.mean_acceptance_length > 1.5, "the draft was meant to see the same"


@BOTH
def test_log_probabilities_are_those_of_plain_decoding(
    pair_of_llamas: LocalStack, params: SamplingParams
) -> None:
    params = replace(params, logprobs=3)
    expected, done = plain(pair_of_llamas, params), generate(pair_of_llamas, with_tree(params, 24, 5))
    assert done.token_ids == expected.token_ids
    for one, other in zip(done.tokens, expected.tokens, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-4)


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 11])
def test_the_last_tokens_end_inside_a_tree(
    pair_of_llamas: LocalStack, params: SamplingParams, max_tokens: int
) -> None:
    params = replace(params, max_tokens=max_tokens)
    done = generate(pair_of_llamas, with_tree(params, 64, 8))
    assert done.token_ids == plain(pair_of_llamas, params).token_ids
    assert len(done.token_ids) == max_tokens


@BOTH
def test_a_tree_larger_than_the_room_that_is_left(pair_of_llamas: LocalStack, params: SamplingParams) -> None:
    """Up to the very last token of the context, with trees of 64 nodes."""
    prompt = [*PROMPT * CONTEXT_LEN][: CONTEXT_LEN - 40]
    params = replace(params, max_tokens=40)
    done = generate(pair_of_llamas, with_tree(params, 64, 8), prompt)
    assert done.token_ids == plain(pair_of_llamas, params, prompt).token_ids
    assert len(done.token_ids) == 40


@BOTH
def test_a_token_that_stops_ends_the_text_where_it_does_in_plain_decoding(
    pair_of_llamas: LocalStack, params: SamplingParams
) -> None:
    """Also the model's own: the tokens of a path after it are never emitted."""
    written = plain(pair_of_llamas, params).token_ids
    stopping = replace(params, stop_token_ids=(written[10],))
    for each in (stopping, replace(stopping, ignore_eos=False, max_tokens=300)):
        expected, done = plain(pair_of_llamas, each), generate(pair_of_llamas, with_tree(each, 24, 5))
        assert (done.token_ids, done.finish_reason) == (expected.token_ids, expected.finish_reason)


@BOTH
def test_a_stop_string_inside_a_tree(stack: LocalStack, params: SamplingParams) -> None:
    """The text ends before the string, wherever in a path its last token lies."""
    params = replace(params, max_tokens=48)

    def text_of(params: SamplingParams) -> Completion:
        return stack.client.generate(PROMPT_TEXT, params)

    written = text_of(replace(params, num_draft_tokens=0)).text
    for start in (5, 12, 20):
        stopping = replace(params, stop=(written[start : start + 4],))
        expected, done = text_of(replace(stopping, num_draft_tokens=0)), text_of(with_tree(stopping, 24, 6))
        assert (done.text, done.finish_reason) == (expected.text, expected.finish_reason)
        assert done.text == written[: written.index(stopping.stop[0])]
