"""Token trees between the services: what is run again, who refuses them, and who serves chains instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from specwire import InvalidRequestError, Rule, SamplingParams, UnsupportedError
from specwire.core import Preparation, Proposal
from specwire.engine.batch import Feed
from specwire.rpc.wire.draft import DraftOrder
from specwire.rpc.wire.verify import VerifyOrder
from specwire.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.support.fixtures import entered
from tests.support.harness import LocalStack, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.model_streams import draft, error_of, opening, raw_stream, verify
from tests.support.pairs import save_good_draft, save_target
from tests.support.refusals import our_errors, refused

PROMPT = [5, 9, 11, 2, 7]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
TREE = replace(GREEDY, num_draft_tokens=24, max_depth=4)
REJECTION = common_pb2.SamplingParams(seed=1, rule=common_pb2.RULE_REJECTION)


@pytest.mark.parametrize(("family", "num_outcomes"), [("llama", "0"), ("gemma3", "16")])
def test_a_round_runs_its_own_nodes_and_one_token(tmp_path: Path, family: str, num_outcomes: str) -> None:
    """The nodes on the accepted path are not run again: only the target's own token after them is new."""
    target, draft = save_target(tmp_path / "target", family), save_good_draft(tmp_path / "draft", family)
    options = {"num_outcomes": num_outcomes}
    with started_services() as services, local_stack(target, draft, coordinator_options=options) as stack:
        runner: Any = services["verify"].runner
        forward, num_run = runner.forward, list[int]()

        def counted(feeds: Sequence[Feed]) -> torch.Tensor:
            num_run.append(sum(len(feed.token_ids) for feed in feeds))
            return forward(feeds)

        runner.forward = counted
        done = stack.client.generate(params=TREE, prompt_token_ids=PROMPT)
        stack.assert_idle_within(2.0)
        for service in services.values():
            check_integrity(service.runner.pool)
    speculation = done.speculation
    assert speculation.mean_acceptance_length > 2, "there was meant to be something to keep"
    assert len(num_run) == speculation.num_rounds
    assert sum(num_run) == len(PROMPT) + speculation.num_draft_tokens + speculation.num_rounds - 1
    assert set(num_run[1:-4]) == {25}, "24 nodes and a token, up to where the end limits them"


# --- refusals ---------------------------------------------------------------------------------------


emulated = entered(
    lambda: local_stack("emulated:step_ms=0", "emulated:step_ms=0", coordinator_options={"rule": "block"})
)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_where_tokens_are_not_matched_the_sdk_refuses(rule: Rule) -> None:
    with refused(InvalidRequestError, "max_depth", "4", "gumbel"):
        SamplingParams(rule=rule, max_depth=4)
    assert SamplingParams(rule=rule, max_depth=4, temperature=0).matches_tokens


def test_the_server_refuses_too(emulated: LocalStack) -> None:
    """Where its own rule does not match tokens, and a client past the SDK."""
    with refused(InvalidRequestError, "max_depth", "4", "gumbel"):
        emulated.client.generate(params=SamplingParams(max_depth=4), prompt_token_ids=PROMPT)
    message = generation_pb2.GenerateRequest(token_ids={"ids": PROMPT}, sampling=REJECTION, max_depth=4)
    with grpc.insecure_channel(emulated.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with refused(InvalidRequestError, "max_depth", "4", "gumbel"), our_errors():
            list(stub.Generate(iter([message]), timeout=30))


@pytest.mark.parametrize(
    ("role", "order", "name"),
    [
        ("draft", DraftOrder(1, 1, 0, [3], 4, max_depth=2), "max_depth"),
        ("draft", DraftOrder(1, 1, 0, [3], 4, prepare=Preparation(1, 4, 2)), "prepare.max_depth"),
        ("verify", VerifyOrder(1, 1, 0, [3], Proposal(1, [1, 2], parents=[-1, -1])), "parent_indices"),
    ],
    ids=["now", "prepared", "verify"],
)
def test_a_tree_under_rejection(emulated: LocalStack, role: str, order: Any, name: str) -> None:
    make: Any = {"draft": draft, "verify": verify}[role]
    request = make(order, opened=[opening()])
    with raw_stream(emulated, role) as stream, refused(UnsupportedError, name, "rejection"):
        raise error_of(stream, request)


# --- chains instead ---------------------------------------------------------------------------------


def test_a_batch_invariant_target_verifies_chains_only(tmp_path: Path) -> None:
    """It refuses trees; where the server chooses, or its own flag says trees, there are chains."""
    target, draft = save_target(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    # Paced, so that drafting pays.
    invariant = {"batch_invariant": True, "least_pass_ms": 20.0}
    fixed = {"num_draft_tokens": "auto", "max_depth": "4"}
    for options in ({"num_draft_tokens": "auto"}, fixed):
        with local_stack(target, draft, verify_options=invariant, coordinator_options=options) as stack:
            with refused(UnsupportedError, "max_depth", "4", "chains only"):
                stack.client.generate(params=TREE, prompt_token_ids=PROMPT)
            params = replace(GREEDY, max_tokens=30)
            done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
            plain = stack.client.generate(params=replace(params, num_draft_tokens=0), prompt_token_ids=PROMPT)
        assert done.token_ids == plain.token_ids
        assert done.speculation.num_accepted_tokens > 0
        assert done.reproducible


def test_a_draft_without_trees_proposes_chains_of_their_depth(tmp_path: Path) -> None:
    target, draft = save_target(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    with local_stack(target, draft, draft_options={"batch_invariant": True}) as stack:
        done = stack.client.generate(params=TREE, prompt_token_ids=PROMPT)
        plain = stack.client.generate(params=replace(GREEDY, num_draft_tokens=0), prompt_token_ids=PROMPT)
    assert done.token_ids == plain.token_ids
    assert 0 < done.speculation.num_draft_tokens <= 4 * done.speculation.num_rounds
