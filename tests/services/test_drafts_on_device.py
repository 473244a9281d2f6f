"""Chains that are chosen on the device are those that the host would have chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from specwire import Rule, SamplingParams
from specwire.cli import status
from specwire.config.client import ClientConfig
from specwire.engine import chosen, models
from specwire.engine.boot import ModelService
from specwire.engine.model import chains
from specwire.engine.model.runner import ModelRunner
from specwire.rule.captured import EagerReplay, Output
from specwire.rule.choices import Kind
from specwire.rule.columns import GREEDY, Encoded
from tests.support.harness import LocalStack, local_stack, started_services
from tests.support.integrity import check_integrity
from tests.support.pairs import save_good_draft, save_target
from tests.support.together import generated
from verify_service.draft_model import ModelDrafts
from verify_service.grown import Growing

PROMPT = [5, 9, 11, 2, 7, 4]
BASE = SamplingParams(max_tokens=32, seed=3, ignore_eos=True, num_draft_tokens=5)
CASES = {
    "greedy": replace(BASE, temperature=0),
    "gumbel": replace(BASE, rule=Rule.GUMBEL, temperature=0.7),
    "gumbel, cut": replace(BASE, rule=Rule.GUMBEL, temperature=1.1, top_p=0.9, top_k=20, min_p=0.02),
    "rejection": replace(BASE, rule=Rule.REJECTION),
    "rejection, cut": replace(BASE, rule=Rule.REJECTION, top_p=0.8),
    "block": replace(BASE, rule=Rule.BLOCK, temperature=0.8),
}


class Warming(EagerReplay):
    """Runs what it captures, as libraries need it."""

    def capture(self, run: Callable[[], Output]) -> Callable[[], Output]:
        run()
        return super().capture(run)


class Stacks(NamedTuple):
    """The same pair, drafted for on the host and on the device, and the draft's runner of each.

    Either in the target's process or by a service, which is asked or prepares outcomes. Where a target goes
    on by itself, or outcomes are prepared, which passes there are depends on time, and texts of drawn tokens
    on those.
    """

    host: LocalStack
    device: LocalStack
    drafting: ModelRunner
    on_host: ModelRunner
    verify: ModelService
    are_asked: bool
    prepares: bool


@pytest.fixture(scope="module", params=["target", "asked", "prepared"])
def stacks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    """The device is a CPU that runs captured steps again and again."""
    directory = tmp_path_factory.mktemp("pair")
    target, draft = save_target(directory / "target"), save_good_draft(directory / "draft")
    options: dict[str, Any] = {"draft": draft, "coordinator_options": {"num_outcomes": "4"}}
    if request.param == "target":
        options = {"verify_options": {"draft_model": str(draft)}}
    elif request.param == "asked":
        options["coordinator_options"] = {"num_outcomes": "0"}

    def runner(services: dict[str, Any]) -> ModelRunner:
        return services["draft"].runner if "draft" in services else services["verify"].runner.drafting

    with ExitStack() as stack:
        with started_services() as services:
            host = stack.enter_context(local_stack(target, **options))
        on_host = runner(services)
        with started_services() as services, mock.patch.object(models, "make_replay", return_value=Warming()):
            device = stack.enter_context(local_stack(target, **options))
        drafting, verify = runner(services), services["verify"]
        is_asked, prepares = request.param == "asked", request.param == "prepared"
        yield Stacks(host, device, drafting, on_host, verify, is_asked, prepares)


def test_the_status_says_what_drafts(stacks: Stacks) -> None:
    said = "draft (" if stacks.host.draft_address else "the target's own draft_model\n"
    assert f"\ndraft: {said}" in status.show(ClientConfig(server=stacks.host.address))


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CASES)
def test_the_same_chains(stacks: Stacks, case: str) -> None:
    assert stacks.drafting._chains is not None
    before = len(stacks.drafting._chains._loops)
    ours, theirs = (
        each.client.generate(params=CASES[case], prompt_token_ids=PROMPT)
        for each in (stacks.device, stacks.host)
    )
    if stacks.are_asked or CASES[case].matches_tokens:
        assert ours.token_ids == theirs.token_ids
        assert ours.speculation.acceptance_histogram == theirs.speculation.acceptance_histogram
    assert ours.speculation.acceptance_histogram[-1] > 0, "whole chains are accepted"
    assert len(stacks.drafting._chains._loops) > before or case == "block"


@pytest.mark.sample(1)
def test_kinds_and_lengths_together(stacks: Stacks) -> None:
    """Those of a kind in one loop, however long each may be; trees and edited rows on the host."""
    others = [
        replace(CASES["greedy"], num_draft_tokens=2),
        replace(CASES["gumbel"], num_draft_tokens=12, max_depth=4),
        replace(CASES["greedy"], repetition_penalty=1.3),
        replace(CASES["gumbel"], num_draft_tokens=1),
    ]
    params = [*CASES.values(), *others]
    together = generated(stacks.device.address, params, PROMPT)
    for done, each in zip(together, params, strict=True):
        if each.matches_tokens:
            assert (
                done.token_ids == stacks.host.client.generate(params=each, prompt_token_ids=PROMPT).token_ids
            )
    stacks.device.assert_idle_within(5.0)


def test_what_the_host_chooses_is_counted_apart(stacks: Stacks) -> None:
    """Else a target whose trees were tried once, which are slower, would never draft chains again."""
    if stacks.are_asked or stacks.prepares:
        pytest.skip("a service says what its own passes cost")
    hosted: dict[bool, set[float]] = {True: set(), False: set()}
    costs = stacks.verify.engine._draft_costs
    for is_tree in (True, False, True):
        params = replace(CASES["gumbel"], num_draft_tokens=12 if is_tree else 5, max_depth=4 * is_tree)
        with mock.patch.object(costs, "add", wraps=costs.add) as added:
            stacks.device.client.generate(params=params, prompt_token_ids=PROMPT)
        hosted[is_tree] |= {features[1] for (features, _), _ in added.call_args_list}
    assert hosted == {True: {1}, False: {0}}


def test_capturing_writes_nothing_of_a_sequence(stacks: Stacks) -> None:
    """Passes that are run for that alone leave the keys of all pages as they are."""
    runner = stacks.drafting
    assert runner._padded is not None
    inputs = runner._padded.new_inputs(runner._padded.buckets.single_stream()[-1])
    num_slots = runner.pool.num_pages * runner.pool.page_size
    with torch.inference_mode():
        before = [layer.keys[:num_slots].clone() for layer in runner._layers.values()]
        logits, encoded = torch.zeros((1, runner.vocab_size)), Encoded.of(SamplingParams(temperature=0), 0)
        choice = chosen.choice(Kind(GREEDY, is_cut=False), [encoded], [1], [1], 4, logits)
        chains._Loop(runner._run_padded, inputs, 16, logits, choice, Warming())
        for layer, keys in zip(runner._layers.values(), before, strict=True):
            assert torch.equal(layer.keys[:num_slots], keys)


def test_where_the_host_chooses_no_pass_is_run_for_nothing(stacks: Stacks) -> None:
    """A pass for each draft token, and those of the prompt."""
    assert not stacks.on_host.can_decode
    with mock.patch.object(stacks.on_host, "forward", wraps=stacks.on_host.forward) as passes:
        done = stacks.host.client.generate(params=CASES["gumbel"], prompt_token_ids=PROMPT)
    assert passes.call_count <= done.speculation.num_draft_tokens + 2 or stacks.prepares


@pytest.mark.sample(1)
def test_a_loop_that_cannot_be_captured(stacks: Stacks, caplog: pytest.LogCaptureFixture) -> None:
    """The host goes on in its place, with the sequences as they were."""
    steps = stacks.drafting._chains
    assert steps is not None
    with (
        mock.patch.multiple(steps, _loops={}, can_run=True),
        mock.patch.object(steps, "_replay", mock.Mock(capture=mock.Mock(side_effect=RuntimeError("no")))),
    ):
        ours = stacks.device.client.generate(params=CASES["gumbel"], prompt_token_ids=PROMPT)
        assert not stacks.drafting.can_decode, "it is not tried again"
    theirs = stacks.host.client.generate(params=CASES["gumbel"], prompt_token_ids=PROMPT)
    assert ours.token_ids == theirs.token_ids
    assert ours.speculation.acceptance_histogram == theirs.speculation.acceptance_histogram
    assert "not chosen on the device: no" in caplog.text
    check_integrity(stacks.drafting.pool)


def test_nodes_lie_in_the_order_in_which_they_were_expanded(stacks: Stacks) -> None:
    """What the nodes of a tree see is said by their places in the draft's sequence."""
    params = replace(CASES["gumbel"], num_draft_tokens=32, max_depth=8)
    found: list[tuple[list[int], list[int]]] = []

    def noted(drafts: ModelDrafts, growing: Growing, nodes: list[int]) -> Any:
        result, own, growth = (
            feed(drafts, growing, nodes),
            drafts._followers[growing.sequence],
            growing.growth,
        )
        if own.tree is not None:
            found.append((own.tokens[own.tree.start :], [growth.token_ids[node] for node in growth.expanded]))
        return result

    feed = ModelDrafts._feed
    with mock.patch.object(ModelDrafts, "_feed", noted):
        stacks.host.client.generate(params=params, prompt_token_ids=PROMPT)
    assert len(found) > 8 or stacks.are_asked or stacks.prepares
    assert all(ours == expanded for ours, expanded in found)
