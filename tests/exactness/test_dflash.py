"""A target with a block drafter: the text of plain decoding, and the distribution under every rule.

Over real services. Text with a drafter of random weights, which is right as often as chance has it;
distributions with one that guesses well, and one that likes best what the target likes least.
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
from tests.support.blocks import save_block_drafter, save_markov_pair
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.pairs import MARKOV_VOCAB_SIZE, logits_of, save_target
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE

SLOW = partial(pytest.param, marks=pytest.mark.slow)
DFLASH = '{"method": "dflash"}'
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
    {"num_draft_tokens": 12},
    {"num_draft_tokens": 16, "max_depth": 3},
    {"num_draft_tokens": 63, "max_depth": 8},
]


@pytest.fixture(scope="module", params=[True, SLOW(False)], ids=["goes on", "waits"])
def stack(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory: Path = tmp_path_factory.mktemp("dflash")
    target, drafter = save_target(directory / "target"), save_block_drafter(directory / "drafter")
    options = {"speculative_config": DFLASH, "verify_ahead": request.param, "num_draft_tokens": "auto"}
    with local_stack(target, coordinator_options=options, verify_options={"dflash": str(drafter)}) as running:
        yield running


@pytest.mark.parametrize("params", KINDS)
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, params: SamplingParams) -> None:
    """With every shape that may be asked for, in one stream and in several; some drafts are right."""
    client, prompt = stack.client, [5, 9, 11, 2, 7, 4]
    plain = client.generate(params=replace(params, draft="off"), prompt_token_ids=prompt)
    assert not plain.speculation.by_source
    num_accepted = 0
    for shape in SHAPES:
        done = client.generate(params=replace(params, **shape), prompt_token_ids=prompt)  # type: ignore[arg-type]
        assert done.token_ids == plain.token_ids
        sources = [each.source for each in done.speculation.by_source]
        assert sources == ["dflash"] or not (sources or shape), "what is chosen may be plain rounds"
        num_accepted += done.speculation.num_accepted_tokens
    assert num_accepted
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
def markov(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_markov_pair(tmp_path_factory.mktemp("markov"), is_hostile=request.param == "hostile")


@pytest.fixture(scope="module")
def address(markov: tuple[Path, Path]) -> Iterator[str]:
    """Of two processes, started as `specwire up --draft dflash:DIR` does. The control below stands for these
    tests in the default run."""
    target, drafter = markov
    with float32_processes(target, f"dflash:{drafter}", num_draft_tokens="2") as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(address: str, markov: tuple[Path, Path], rule: Rule) -> None:
    params, logits = SamplingParams(max_tokens=NUM_TOKENS, rule=rule), logits_of(markov[0])
    completions = asyncio.run(_sample(address, params, NUM_STREAMS))
    assert sum(done.speculation.num_draft_tokens for done in completions) > NUM_STREAMS * NUM_TOKENS / 4
    assert fit_p_value(completions, logits, params) > FALSE_ALARM_RATE
    few = replace(params, logit_bias=FEW)
    joint = asyncio.run(_sample(address, few, NUM_STREAMS // 2))
    assert fit_p_value(joint, logits, few, num_before=2) > FALSE_ALARM_RATE


@pytest.mark.slow
def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """A good drafter's first token is accepted, and a hostile one's never: the tests above have both."""
    params = SamplingParams(max_tokens=60, temperature=0, num_draft_tokens=1)
    [done] = asyncio.run(_sample(address, params, 1))
    is_hostile = "hostile" in request.node.name
    assert done.speculation.num_rounds > 50 if is_hostile else done.speculation.num_rounds < 35


async def _sample(address: str, params: SamplingParams, num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        each = [replace(params, seed=seed) for seed in range(num)]
        return await asyncio.gather(*(client.generate(params=p, prompt_token_ids=PROMPT) for p in each))


def believing(proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
    """Takes a proposal at its word where its tokens are likely ones of the target."""
    if proposal.token_ids and all(probs[0] > 0.09 for probs in verdict.target_probs):
        return Outcome(range(len(proposal.token_ids)), verdict.target_token_ids[-1])
    return acceptance.accept(proposal, verdict, params, seed)


def test_control_a_rule_that_believes_the_drafter_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same services fit the distribution with the right rule, and do not with this one."""
    target, drafter = save_markov_pair(tmp_path)
    options = {"speculative_config": DFLASH, "num_draft_tokens": "2"}
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=Rule.REJECTION)
    with local_stack(target, coordinator_options=options, verify_options={"dflash": str(drafter)}) as running:
        right = asyncio.run(_sample(running.address, params, NUM_STREAMS))
        monkeypatch.setattr(coordinator.generation, "acceptance", SimpleNamespace(accept=believing))
        monkeypatch.setattr(verify_service.own, "acceptance", SimpleNamespace(accept=believing))
        wrong = asyncio.run(_sample(running.address, params, NUM_STREAMS))
    assert fit_p_value(right, logits_of(target), params) > FALSE_ALARM_RATE
    assert fit_p_value(wrong, logits_of(target), params) < CLEARLY_WRONG
