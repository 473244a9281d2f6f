"""Several lists of Gumbel noise, through the services: the text, what is drawn, and who refuses them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.lists import shared_out
from specwire import Completion, InvalidRequestError, Rule, SamplingParams, UnsupportedError, chains
from specwire.cli import drafts
from specwire.client.resume import ReceivedTokens
from specwire.core import Fate, Preparation
from specwire.rule.random import gumbel_noise
from specwire.testing.delay_proxy import Link
from specwire.v1 import common_pb2
from specwire.wire import client as client_wire
from specwire.wire import model as wire
from specwire.wire import proposals
from specwire.wire.draft import DraftOrder
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import SequenceFailedError, draft, opening, raw_stream, sampling
from tests.support.pairs import (
    markov_logits,
    markov_model,
    save_good_draft,
    save_hostile_draft,
    save_target,
)
from tests.support.raw_streams import Wire
from tests.support.tiny_models import save

PROMPT = [3, 1, 4, 1, 5]
NUM_LISTS, LENGTH = 3, 4
LISTS = SamplingParams(rule=Rule.GUMBEL, num_lists=NUM_LISTS, seed=7, max_tokens=24, ignore_eos=True)
PLAIN = replace(LISTS, num_draft_tokens=0)
FOUR = replace(LISTS, num_draft_tokens=LENGTH)
WARPED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {5: 1.0}}


def options(**others: Any) -> dict[str, Any]:
    config = {"method": "draft_model", "selection": "lists", "num_chains": NUM_LISTS}
    return {"speculative_config": json.dumps(config), **others}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    return save_target(directory / "target"), save_good_draft(directory / "draft", noise=0.3)


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    with local_stack(*pair, coordinator_options={"num_outcomes": "8"}) as running:
        yield running


def generate(stack: LocalStack, params: SamplingParams) -> Completion:
    return stack.client.generate(params=params, prompt_token_ids=PROMPT)


@pytest.mark.parametrize(
    "changes", [pytest.param({}, id="plain", marks=pytest.mark.slow), pytest.param(WARPED, id="warped")]
)
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, changes: dict[str, Any]) -> None:
    """With chains of any length, of chosen lengths, from text, and without a draft."""
    expected = generate(stack, replace(PLAIN, **changes))
    assert expected.num_lists == NUM_LISTS
    for drafting in ({"num_draft_tokens": 1}, {"num_draft_tokens": 5}, {}, {"draft": "ngram"}):
        done = generate(stack, replace(LISTS, **changes, **drafting))
        assert done.token_ids == expected.token_ids
    assert generate(stack, replace(FOUR, **changes)).speculation.num_accepted_tokens > 0


def test_the_text_is_that_of_any_draft(tmp_path: Path, stack: LocalStack, pair: tuple[Path, Path]) -> None:
    hostile = save_hostile_draft(tmp_path / "hostile")
    expected = generate(stack, PLAIN).token_ids
    with local_stack(pair[0], hostile) as other:
        assert generate(other, FOUR).token_ids == expected
        assert generate(other, FOUR).speculation.num_draft_tokens > 0


def test_the_number_of_lists_makes_the_text(stack: LocalStack) -> None:
    """One is the coupling of requests that name none; each other number has a text of its own."""
    texts = [generate(stack, replace(PLAIN, num_lists=num)).token_ids for num in (None, 1, 2, 3, 8)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_greedy_decoding_has_no_lists(stack: LocalStack) -> None:
    greedy = replace(LISTS, temperature=0)
    done = generate(stack, greedy)
    assert done.num_lists == 1
    assert done.token_ids == generate(stack, replace(greedy, num_lists=None, num_draft_tokens=0)).token_ids


def test_a_server_may_choose_the_number(stack: LocalStack, pair: tuple[Path, Path]) -> None:
    """Then requests that name no rule are coupled, with any draft and without."""
    free = replace(LISTS, rule=None, num_lists=None)
    with local_stack(*pair, coordinator_options=options()) as other:
        expected = generate(other, replace(free, num_draft_tokens=0))
        assert expected.token_ids == generate(stack, PLAIN).token_ids
        for drafting in ({}, {"draft": "ngram"}, {"num_draft_tokens": 3}):
            assert generate(other, replace(free, **drafting)).token_ids == expected.token_ids
        done = generate(other, replace(free, seed=None))
        assert (done.rule, done.num_lists) == (Rule.GUMBEL, NUM_LISTS)
        assert generate(other, replace(free, num_lists=1)).num_lists == 1
        assert generate(other, replace(free, rule=Rule.BLOCK)).num_lists == 1
        assert not generate(other, replace(free, temperature=0, max_depth=4)).speculation.draft_unavailable
        with pytest.raises(InvalidRequestError, match="max_depth"):
            generate(other, replace(free, max_depth=4))


def test_several_chains_are_drafted(stack: LocalStack) -> None:
    """As nodes of a tree; nothing is prepared, and the target does not go on by itself."""
    done = generate(stack, FOUR).speculation
    assert len(done.drafted_per_position) == LENGTH
    assert LENGTH < done.num_draft_tokens / done.num_rounds <= NUM_LISTS * LENGTH
    assert done.num_prepared == 0
    many = generate(stack, replace(LISTS, num_lists=8, num_draft_tokens=16, max_tokens=40)).speculation
    assert many.num_draft_tokens <= 64 * many.num_rounds
    assert len(many.drafted_per_position) == 16


def test_each_chain_is_drawn_with_its_share_of_the_lists(tmp_path: Path) -> None:
    """Over the wire's own bytes, for a draft whose logits follow from the last token."""
    model, length = markov_model(0.5), 5
    scores = torch.log_softmax(markov_logits(model), dim=-1).double().numpy()
    target, own = save(markov_model(), tmp_path / "target"), save(model, tmp_path / "draft")
    num_nodes = set()
    with local_stack(target, own) as stack:
        for seed in range(6):
            expected: list[list[int]] = [[] for _ in range(NUM_LISTS)]
            for depth in range(length):
                at = [expected.index(chain) for chain in expected]
                noise = [gumbel_noise(seed, [len(PROMPT) + depth], 16, None, i)[0] for i in range(NUM_LISTS)]
                tokens = []
                for chain, race in zip(expected, shared_out(NUM_LISTS, at), strict=True):
                    of_all = np.max([noise[i] for i in race.lists], axis=0)
                    tokens.append(int((scores[(PROMPT + chain)[-1]] + of_all).argmax()))
                expected = [[*chain, token] for chain, token in zip(expected, tokens, strict=True)]
            found = ask_for_chains(stack, seed, length)
            token_ids, parents, _ = chains.joined(expected)
            assert (list(found.token_ids), list(found.parents)) == (token_ids, parents)
            num_nodes.add(len(token_ids))
    assert len(num_nodes) > 1


def ask_for_chains(stack: LocalStack, seed: int, length: int) -> Any:
    params = SamplingParams(seed=seed, rule=Rule.GUMBEL, num_lists=NUM_LISTS)
    opened = wire.open_sequence(params, len(PROMPT))
    opened.sequence_id = 1
    order = DraftOrder(1, 1, 0, PROMPT, length, num_chains=NUM_LISTS, prepare=Preparation(8, 4))
    with raw_stream(stack, "draft") as stream:
        response = stream.ask(draft(order, opened=[opened]))
    (found,) = proposals.split(proposals.columns_from_proto(response.proposals, 1), [len(PROMPT)])
    return found


def test_the_text_goes_on_after_a_target_was_lost(pair: tuple[Path, Path]) -> None:
    with local_stack(*pair, coordinator_options={"failover_timeout_s": 30.0}, verify_link=Link()) as stack:
        expected = generate(stack, FOUR)
        token_ids: list[int] = []
        with stack.client.stream(params=FOUR, prompt_token_ids=PROMPT) as stream:
            for chunk in stream:
                if not token_ids:
                    assert stack.verify_proxy is not None
                    stack.verify_proxy.cut()
                token_ids += [token.token_id for token in chunk.tokens if token.fate is not Fate.REJECTED]
        assert token_ids == list(expected.token_ids)
        stack.assert_idle_within(2.0)


def test_another_server_goes_on_with_as_many_lists(stack: LocalStack, pair: tuple[Path, Path]) -> None:
    """One that would choose another number by itself."""
    params = replace(FOUR, rule=None, num_lists=None)

    async def cut_and_resumed(first: str, second: str) -> tuple[int, list[int]]:
        progress = ReceivedTokens(client_wire.generate_request(None, params, PROMPT))
        async with Wire(first) as begun, Wire(second) as resumed:
            for message in await begun.read(progress.request(), 2):
                progress.take(message)
            num_before = len(progress.tokens)
            for message in (await resumed.read(progress.request()))[:-1]:
                progress.take(message)
        return num_before, [token.token_id for token in progress.tokens]

    with local_stack(*pair, coordinator_options=options()) as other:
        num_before, token_ids = asyncio.run(cut_and_resumed(other.address, stack.address))
    assert 0 < num_before < len(token_ids)
    assert token_ids == list(generate(stack, PLAIN).token_ids)


def test_a_batch_invariant_target_judges_one_chain(stack: LocalStack, pair: tuple[Path, Path]) -> None:
    with local_stack(*pair, verify_options={"batch_invariant": True}) as other:
        done = generate(other, FOUR)
        assert done.token_ids == generate(other, PLAIN).token_ids
        assert done.speculation.num_draft_tokens <= LENGTH * done.speculation.num_rounds


def test_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    size: dict[str, Any] = {"max_position_embeddings": 48}
    pair = save_target(tmp_path / "target", **size), save_good_draft(tmp_path / "draft", **size)
    with local_stack(*pair) as stack:
        done = generate(stack, replace(FOUR, max_tokens=None))
        assert len(PROMPT) + len(done.token_ids) == 48
        assert not done.speculation.draft_unavailable
        assert done.token_ids == generate(stack, replace(PLAIN, max_tokens=None)).token_ids


@pytest.mark.parametrize(
    ("given", "num_chains", "error", "field"),
    [
        ({}, 2, UnsupportedError, "num_chains"),
        ({"num_lists": 2}, 3, UnsupportedError, "num_chains"),
        ({"num_lists": 2, "temperature": 0}, 2, UnsupportedError, "num_chains"),
        ({"rule": common_pb2.RULE_BLOCK, "num_lists": 2}, 1, InvalidRequestError, "num_lists"),
    ],
)
def test_what_the_draft_service_refuses(
    stack: LocalStack, given: dict[str, Any], num_chains: int, error: type[Exception], field: str
) -> None:
    order = DraftOrder(1, 1, 0, PROMPT, 4, num_chains=num_chains)
    given = {"rule": common_pb2.RULE_GUMBEL} | given
    message = draft(order, opened=[opening(sampling=sampling(**given))])
    with raw_stream(stack, "draft") as stream, pytest.raises(SequenceFailedError, match=field) as refused:
        stream.ask(message)
    assert type(refused.value.error) is error


def test_the_table_of_drafts_has_them(stack: LocalStack) -> None:
    target, own = stack.client.get_model_info()
    (line,) = (line for line in drafts.lines(target, own, {}) if line.name == "lists")
    assert line.here == "yes"
