"""Several chains in a round, through the services: what is drawn, when, and who refuses them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specwire import Completion, InvalidRequestError, Rule, SamplingParams, SpecwireError, UnsupportedError
from specwire.config.link import Link
from specwire.core import Preparation
from specwire.proposals import chains
from specwire.rpc.wire import model as wire
from specwire.rpc.wire import proposals
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import VerifyOrder
from specwire.rule.random import Purpose, uniform
from specwire.support import Support
from specwire.v1 import common_pb2
from tests.support import texts
from tests.support.harness import LocalStack, local_stack
from tests.support.model_streams import draft, error_of, opening, raw_stream, sampling, verify
from tests.support.pairs import save_good_draft, save_target
from tests.support.refusals import refused

PROMPT = [3, 1, 4, 1, 5]
KSEQ = SamplingParams(rule=Rule.KSEQ, seed=7, max_tokens=24, ignore_eos=True)
NUM_CHAINS, LENGTH = 3, 4


def options(num_chains: int = NUM_CHAINS, **others: Any) -> dict[str, Any]:
    config = {"method": "draft_model", "selection": "kseq", "num_chains": num_chains}
    return {"speculative_config": json.dumps(config), **others}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    return save_target(directory / "target"), save_good_draft(directory / "draft", noise=0.3)


@pytest.fixture(scope="module")
def stack(pair: tuple[Path, Path]) -> Iterator[LocalStack]:
    given = options(num_outcomes="8")
    with local_stack(*pair, coordinator_options=given, draft_options={"max_support": 20}) as running:
        yield running


def generate(stack: LocalStack, params: SamplingParams, **given: Any) -> Completion:
    return stack.client.generate(params=params, prompt_token_ids=PROMPT, **given)


def ask_for_chains(stack: LocalStack, seed: int, **changes: Any) -> Any:
    opened = wire.open_sequence(SamplingParams(seed=seed, rule=Rule.KSEQ), len(PROMPT))
    opened.sequence_id = 1
    order = DraftOrder(1, 1, 0, PROMPT, LENGTH, num_chains=NUM_CHAINS)._replace(**changes)
    with raw_stream(stack, "draft") as stream:
        return stream.ask(draft(order, opened=[opened]))


def test_each_chain_is_drawn_with_numbers_of_its_own(stack: LocalStack) -> None:
    """Over the wire's own bytes: inverting what was sent with the numbers of a chain gives its tokens."""
    for seed in range(2):
        found = ask_for_chains(stack, seed).proposals
        assert found.num_chains == [NUM_CHAINS]
        (several,) = proposals.from_proto(found, [len(PROMPT)], texts.VOCAB_SIZE)
        assert len(several.leaves) == NUM_CHAINS
        token_ids, supports = chains.laid_out(several)
        assert found.token_ids == np.array(token_ids, "<i4").tobytes()
        for place, (token_id, support) in enumerate(zip(token_ids, supports, strict=True)):
            chain, i = divmod(place, LENGTH)
            cumulative = support.probs.astype(np.float64).cumsum()
            number = uniform(seed, Purpose.DRAFT, len(PROMPT) + i, len(PROMPT), chain) * cumulative[-1]
            assert support.token_ids[np.searchsorted(cumulative, number, side="right")] == token_id
        assert len(set(map(tuple, chains.split(several)[0]))) > 1


def test_neither_size_nor_passes_depend_on_tokens(stack: LocalStack) -> None:
    """A message, and how many tokens the draft runs for it, whether or not some chains coincide."""
    ask_for_chains(stack, 0)  # the prompt is cached from now on
    num_bytes, num_run, num_nodes = set(), set(), set()
    for seed in range(1, 17):
        before = stack.status("draft").num_tokens
        found = ask_for_chains(stack, seed).proposals
        num_bytes.add(found.ByteSize())
        num_run.add(stack.status("draft").num_tokens - before)
        (several,) = proposals.from_proto(found, [len(PROMPT)], texts.VOCAB_SIZE)
        num_nodes.add(len(several.token_ids))
    assert len(num_bytes) == len(num_run) == 1 < len(num_nodes)


def test_nothing_is_prepared(stack: LocalStack) -> None:
    """Neither by the draft service, whoever asks, nor does the target go on by itself."""
    response = ask_for_chains(stack, 1, prepare=Preparation(8, 4))
    assert len(response.sequence_ids) == 1
    done = generate(stack, KSEQ).speculation
    assert done.num_prepared == 0
    assert done.num_accepted_tokens > 0
    # Counts are of nodes and depths.
    assert len(done.drafted_per_position) == LENGTH
    assert 1.5 * LENGTH < done.num_draft_tokens / done.num_rounds <= NUM_CHAINS * LENGTH


def test_the_rule_of_requests_that_name_none(stack: LocalStack) -> None:
    free = replace(KSEQ, rule=None, seed=None)
    assert generate(stack, free).rule is Rule.KSEQ
    assert generate(stack, replace(free, seed=3)).rule is Rule.GUMBEL
    assert generate(stack, replace(free, draft="ngram")).rule is not Rule.KSEQ
    assert generate(stack, replace(free, rule=Rule.REJECTION)).rule is Rule.REJECTION


def test_greedy_decoding_is_as_ever(stack: LocalStack) -> None:
    greedy = replace(KSEQ, temperature=0)
    assert generate(stack, greedy).token_ids == generate(stack, replace(greedy, num_draft_tokens=0)).token_ids


def test_a_seed_repeats_the_text_after_a_target_was_lost(pair: tuple[Path, Path]) -> None:
    """The same proposals are judged again, by the same numbers."""
    given = options(failover_timeout_s=30.0)
    with local_stack(*pair, coordinator_options=given, verify_link=Link()) as stack:
        expected = generate(stack, KSEQ)
        assert stack.verify_proxy is not None
        with stack.client.stream(params=KSEQ, prompt_token_ids=PROMPT) as stream:
            next(iter(stream))
            stack.verify_proxy.cut()
            for _ in stream:
                pass
            assert stream.completion.token_ids == expected.token_ids
        stack.assert_idle_within(2.0)


def test_penalties_biases_and_log_probabilities(stack: LocalStack) -> None:
    """Of each node by its own path: a seed repeats them, and every emitted token has its log probability."""
    params = replace(
        KSEQ, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={5: 1.0}, logprobs=2, top_p=0.9
    )
    done = generate(stack, params)
    assert done.token_ids == generate(stack, params).token_ids
    assert done.speculation.num_accepted_tokens > 0
    assert all(token.logprob is not None and token.logprob <= 0 for token in done.tokens)


@pytest.mark.slow
def test_many_draft_tokens_leave_room_for_few_chains(stack: LocalStack) -> None:
    """A verify pass has 64 draft tokens at most."""
    for num, num_chains in ((32, 2), (33, 1)):
        done = generate(stack, replace(KSEQ, num_draft_tokens=num, max_tokens=36)).speculation
        assert len(done.drafted_per_position) == num
        assert done.num_draft_tokens <= 64 * done.num_rounds
        drafted = sum(done.drafted_per_position)
        assert (done.num_draft_tokens > drafted) == (num_chains > 1)


def test_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """Where it has no room for all chains, one is drawn."""
    size: dict[str, Any] = {"max_position_embeddings": 48}
    pair = save_target(tmp_path / "target", **size), save_good_draft(tmp_path / "draft", **size)
    with local_stack(*pair, coordinator_options=options()) as stack:
        done = generate(stack, replace(KSEQ, max_tokens=None))
        assert len(PROMPT) + len(done.token_ids) == 48
        assert not done.speculation.draft_unavailable


def test_a_batch_invariant_target_judges_one_chain(pair: tuple[Path, Path]) -> None:
    with local_stack(*pair, coordinator_options=options(), verify_options={"batch_invariant": True}) as stack:
        expected = generate(stack, replace(KSEQ, rule=Rule.REJECTION))
        assert generate(stack, KSEQ).token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("rule", "num_chains", "error"),
    [
        (common_pb2.RULE_REJECTION, 2, UnsupportedError),
        (common_pb2.RULE_GUMBEL, 2, UnsupportedError),
        (common_pb2.RULE_KSEQ, 0, InvalidRequestError),
    ],
)
def test_what_the_draft_service_refuses(
    stack: LocalStack, rule: Any, num_chains: int, error: type[SpecwireError]
) -> None:
    """More chains than there may be: `test_wire_limits`."""
    order = DraftOrder(1, 1, 0, PROMPT, 4, num_chains=num_chains)
    message = draft(order, opened=[opening(sampling=sampling(rule=rule))])
    with raw_stream(stack, "draft") as stream, refused(error, "num_chains"):
        raise error_of(stream, message)


def test_other_rules_have_one_chain(stack: LocalStack) -> None:
    proposal = chains.merged(
        [[1], [2]], [[Support(np.array([1, 2]), np.full(2, 0.5, np.float32))]] * 2, len(PROMPT)
    )
    order = VerifyOrder(1, 1, 0, PROMPT, proposal)
    message = verify(order, opened=[opening(sampling=sampling(rule=common_pb2.RULE_BLOCK))])
    with raw_stream(stack, "verify") as stream:
        assert "num_chains" in str(error_of(stream, message))
