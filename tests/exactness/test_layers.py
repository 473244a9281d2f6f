"""A target that drafts without some of its layers: the text of plain decoding, and the distribution it has.

Over real services, under every rule, with proposals that end early and with long ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import coordinator.generation
import verify_service.layers
import verify_service.own
from specwire import AsyncClient, Completion, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig
from specwire.core import Outcome, Proposal, Verdict
from specwire.rule import acceptance
from tests.support.harness import LocalStack, local_stack
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.pairs import markov_logits, markov_model, save_target
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.tiny_models import save
from verify_service.threshold import Threshold

LAYERS = '{"method": "layers"}'
GUMBEL = SamplingParams(max_tokens=32, seed=7, rule=Rule.GUMBEL, ignore_eos=True)
KINDS = [
    pytest.param(replace(GUMBEL, temperature=0), id="greedy"),
    pytest.param(replace(GUMBEL, temperature=0.4), id="gumbel"),
    pytest.param(
        replace(GUMBEL, temperature=0.4, logprobs=2, presence_penalty=1.0, logit_bias={5: 1.0}, top_p=0.9),
        id="every parameter",
    ),
]
LENGTHS = (None, 1, 5, 12)
NEAR, FAR = "m1", "a0,a1,m0,m1"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((NEAR, True), id="near, goes on"),
        pytest.param((FAR, False), id="far, waits"),
        pytest.param((NEAR, False), id="near, waits", marks=pytest.mark.slow),
        pytest.param((FAR, True), id="far, goes on", marks=pytest.mark.slow),
    ],
)
def stack(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Where it goes on by itself proposals are as long as wanted, else they end early."""
    skip, goes_on = request.param
    target = save_target(tmp_path_factory.mktemp("target"))
    options = {"speculative_config": LAYERS, "verify_ahead": goes_on, "num_draft_tokens": "auto"}
    threshold = partial(Threshold, first=0.0) if goes_on else Threshold
    with (
        mock.patch.object(verify_service.layers, "Threshold", threshold),
        local_stack(target, coordinator_options=options, verify_options={"layers": skip}) as running,
    ):
        yield running


@pytest.mark.sample(2)
@pytest.mark.parametrize("params", KINDS)
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, params: SamplingParams) -> None:
    """With every length that may be asked for, in one stream and in several."""
    client, prompt = stack.client, [5, 9, 11, 2, 7, 4]
    plain = client.generate(params=replace(params, draft="off"), prompt_token_ids=prompt)
    assert not plain.speculation.by_source
    for num in LENGTHS:
        done = client.generate(params=replace(params, num_draft_tokens=num), prompt_token_ids=prompt)
        assert done.token_ids == plain.token_ids
        sources = [each.source for each in done.speculation.by_source]
        assert sources == ["layers"] or not (sources or num), "what is chosen may be plain rounds"
    together = asyncio.run(_together(stack.address, replace(params, num_draft_tokens=4), prompt, 4))
    assert {done.token_ids for done in together} == {plain.token_ids}
    stack.assert_idle_within(2.0)


async def _together(address: str, params: SamplingParams, prompt: list[int], num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(
            *(client.generate(params=params, prompt_token_ids=prompt) for _ in range(num))
        )


# --- distributions ------------------------------------------------------------------------------------

NUM_STREAMS, NUM_TOKENS = 64, 50


def target_model() -> Any:
    """Its attention writes nothing, so that the last token alone decides; its MLP does."""
    model = markov_model()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return markov_logits(target_model())


@pytest.fixture(
    scope="module",
    params=[pytest.param("a0", id="same", marks=pytest.mark.slow), pytest.param("m0", id="other")],
)
def address(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The draft is the target's equal without its attention, then in processes of their own as `specwire up
    --draft layers:SKIP` starts them, and another model without its MLP."""
    target = save(target_model(), tmp_path_factory.mktemp("markov") / "target")
    if request.param == "m0":
        options = {"speculative_config": LAYERS, "num_draft_tokens": "2"}
        with local_stack(target, coordinator_options=options, verify_options={"layers": "m0"}) as local:
            yield local.address
        return
    config = UpConfig(
        target=str(target),
        draft="layers:a0",
        dtype="float32",
        address="127.0.0.1:0",
        num_draft_tokens="2",
        num_threads=1,
    )
    with Stack(config) as running:
        yield running.address


@pytest.mark.parametrize(
    "rule",
    [Rule.REJECTION, *(pytest.param(rule, marks=pytest.mark.slow) for rule in (Rule.BLOCK, Rule.GUMBEL))],
)
def test_the_distribution_is_the_targets(address: str, logits: torch.Tensor, rule: Rule) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=rule)
    completions = asyncio.run(_sample(address, params, NUM_STREAMS))
    assert sum(done.speculation.num_draft_tokens for done in completions) > NUM_STREAMS * NUM_TOKENS / 4
    assert fit_p_value(completions, logits, params) > FALSE_ALARM_RATE


def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """All tokens of the target's equal are accepted, and few of the other: the tests above have both."""
    params = SamplingParams(max_tokens=60, temperature=0, num_draft_tokens=1)
    [done] = asyncio.run(_sample(address, params, 1))
    is_same = "same" in request.node.name
    assert done.speculation.num_rounds < 35 if is_same else done.speculation.num_rounds > 40


async def _sample(address: str, params: SamplingParams, num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        each = [replace(params, seed=seed) for seed in range(num)]
        return await asyncio.gather(*(client.generate(params=p, prompt_token_ids=PROMPT) for p in each))


def believing(proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
    """Takes a proposal at its word where the draft's likeliest token is a likely one of the target."""
    if proposal.token_ids and all(probs[0] > 0.09 for probs in verdict.target_probs):
        return Outcome(range(len(proposal.token_ids)), verdict.target_token_ids[-1])
    return acceptance.accept(proposal, verdict, params, seed)


def test_control_a_rule_that_believes_the_draft_is_caught(
    tmp_path: Path, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    target = save(target_model(), tmp_path / "target")
    monkeypatch.setattr(coordinator.generation, "acceptance", SimpleNamespace(accept=believing))
    monkeypatch.setattr(verify_service.own, "acceptance", SimpleNamespace(accept=believing))
    options = {"speculative_config": LAYERS, "num_draft_tokens": "2"}
    with local_stack(target, coordinator_options=options, verify_options={"layers": "a0"}) as running:
        params = SamplingParams(max_tokens=NUM_TOKENS, rule=Rule.REJECTION)
        completions = asyncio.run(_sample(running.address, params, NUM_STREAMS))
    assert fit_p_value(completions, logits, params) < CLEARLY_WRONG
