"""A target that drafts with layers of its own: the text of plain decoding, the distribution under every rule.

Over real services. Layers guess well, or like best what the target likes least.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import coordinator.generation
import verify_service.own
from specwire import AsyncClient, Completion, Rule, SamplingParams
from specwire.core import Outcome, Proposal, Verdict
from specwire.rule import acceptance
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.mtp import save_markov_target, save_mtp_target
from tests.support.pairs import MARKOV_VOCAB_SIZE, logits_of
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE

SLOW = partial(pytest.param, marks=pytest.mark.slow)
MTP = '{"method": "mtp"}'
GUMBEL = SamplingParams(max_tokens=32, seed=7, rule=Rule.GUMBEL, ignore_eos=True)
KINDS = [
    SLOW(replace(GUMBEL, temperature=0), id="greedy"),
    SLOW(replace(GUMBEL, temperature=0.4), id="gumbel"),
    pytest.param(
        replace(GUMBEL, temperature=0.4, logprobs=2, presence_penalty=1.0, logit_bias={5: 1.0}, top_p=0.9),
        id="every parameter",
    ),
]
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5},
    {"num_draft_tokens": 12},
]


@pytest.fixture(scope="module", params=["mellum", SLOW("glm4_moe"), SLOW("hostile")])
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one layer and a window, with two layers, and with one that guesses wrong."""
    is_hostile = request.param == "hostile"
    family = "mellum" if is_hostile else request.param
    return save_mtp_target(tmp_path_factory.mktemp("mtp") / "target", family, is_hostile=is_hostile)


@pytest.fixture(scope="module", params=[True, SLOW(False)], ids=["goes on", "waits"])
def stack(request: Any, target: Path) -> Iterator[LocalStack]:
    options = {"speculative_config": MTP, "verify_ahead": request.param, "num_draft_tokens": "auto"}
    with local_stack(target, coordinator_options=options, verify_options={"mtp": True}) as running:
        yield running


@pytest.mark.parametrize("params", KINDS)
def test_the_text_is_that_of_plain_decoding(
    stack: LocalStack, params: SamplingParams, request: pytest.FixtureRequest
) -> None:
    """With every length that may be asked for, in one stream and in several."""
    client, prompt = stack.client, [5, 9, 11, 2, 7, 4]
    plain = client.generate(params=replace(params, draft="off"), prompt_token_ids=prompt)
    assert not plain.speculation.by_source
    for shape in SHAPES:
        done = client.generate(params=replace(params, **shape), prompt_token_ids=prompt)  # type: ignore[arg-type]
        assert done.token_ids == plain.token_ids
        sources = [each.source for each in done.speculation.by_source]
        assert sources == ["mtp"] or not (sources or shape), "what is chosen may be plain rounds"
    if params.temperature == 0 and "hostile" not in request.node.name:
        assert len(done.token_ids) / done.speculation.num_rounds > 1.5
    together = asyncio.run(_together(stack.address, params, prompt, 6))
    assert {done.token_ids for done in together} == {plain.token_ids}
    stack.assert_idle_within(2.0)


async def _together(address: str, params: SamplingParams, prompt: list[int], num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(
            *(client.generate(params=params, prompt_token_ids=prompt) for _ in range(num))
        )


# --- distributions ------------------------------------------------------------------------------------

NUM_STREAMS, NUM_TOKENS = 64, 50
FEW = {i: -100.0 for i in range(MARKOV_VOCAB_SIZE) if i not in (1, 4, 9)}
"""Biases that leave three tokens, so that three successive ones are tested for their joint distribution."""


@pytest.fixture(scope="module", params=["good", "hostile"])
def markov(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("markov") / "target"
    return save_markov_target(directory, is_hostile=request.param == "hostile")


@pytest.fixture(scope="module")
def address(markov: Path) -> Iterator[str]:
    """Of two processes, started as `specwire up --draft mtp` does. The control below stands for these tests
    in the default run."""
    with float32_processes(markov, "mtp", num_draft_tokens="2") as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(address: str, markov: Path, rule: Rule) -> None:
    params, logits = SamplingParams(max_tokens=NUM_TOKENS, rule=rule), logits_of(markov)
    completions = asyncio.run(_sample(address, params, NUM_STREAMS))
    assert sum(done.speculation.num_draft_tokens for done in completions) > NUM_STREAMS * NUM_TOKENS / 4
    assert fit_p_value(completions, logits, params) > FALSE_ALARM_RATE
    few = replace(params, logit_bias=FEW)
    joint = asyncio.run(_sample(address, few, NUM_STREAMS // 2))
    assert fit_p_value(joint, logits, few, num_before=2) > FALSE_ALARM_RATE


@pytest.mark.slow
def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """All tokens of good layers are accepted, and of hostile ones none: the tests above have both."""
    params = SamplingParams(max_tokens=60, temperature=0, num_draft_tokens=4)
    [done] = asyncio.run(_sample(address, params, 1))
    is_hostile = "hostile" in request.node.name
    assert done.speculation.num_rounds > 50 if is_hostile else done.speculation.num_rounds < 20


async def _sample(address: str, params: SamplingParams, num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        each = [replace(params, seed=seed) for seed in range(num)]
        return await asyncio.gather(*(client.generate(params=p, prompt_token_ids=PROMPT) for p in each))


def typical(proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
    """Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1): tokens that are likely enough."""
    if all(probs[0] > 0.09 for probs in verdict.target_probs):
        return Outcome(range(len(proposal.token_ids)), verdict.target_token_ids[-1])
    return acceptance.accept(proposal, verdict, params, seed)


def test_control_typical_acceptance_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same services fit the distribution with the right rule, and do not with this one."""
    target = save_markov_target(tmp_path / "target")
    options = {"speculative_config": MTP, "num_draft_tokens": "2"}
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=Rule.REJECTION)
    with local_stack(target, coordinator_options=options, verify_options={"mtp": True}) as running:
        right = asyncio.run(_sample(running.address, params, NUM_STREAMS))
        monkeypatch.setattr(coordinator.generation, "acceptance", SimpleNamespace(accept=typical))
        monkeypatch.setattr(verify_service.own, "acceptance", SimpleNamespace(accept=typical))
        wrong = asyncio.run(_sample(running.address, params, NUM_STREAMS))
    assert fit_p_value(right, logits_of(target), params) > FALSE_ALARM_RATE
    assert fit_p_value(wrong, logits_of(target), params) < CLEARLY_WRONG
