"""A target that drafts for itself: the text of plain decoding, and the distribution under every rule.

Over real services. Heads are the target's own, fitted to guess well, or negated to guess as badly as they
can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import coordinator.generation
import verify_service.own
from coordinator.servicer import GenerationServicer
from specwire import AsyncClient, Completion, Rule, SamplingParams
from specwire.core import Outcome, Proposal, Verdict
from specwire.rule import acceptance
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.heads import save_heads
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.pairs import MARKOV_VOCAB_SIZE, markov_logits, markov_model, save_target
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.tiny_models import save

HEADS = '{"method": "medusa"}'
GUMBEL = SamplingParams(max_tokens=48, seed=7, rule=Rule.GUMBEL, ignore_eos=True)
KINDS = [
    pytest.param(replace(GUMBEL, temperature=0), id="greedy"),
    pytest.param(replace(GUMBEL, temperature=0.4), id="gumbel"),
    pytest.param(
        replace(GUMBEL, temperature=0.4, logprobs=2, presence_penalty=1.0, logit_bias={5: 1.0}, top_p=0.9),
        id="every parameter",
    ),
]
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5, "max_depth": 0},
    {"num_draft_tokens": 16, "max_depth": 4},
    {"num_draft_tokens": 63, "max_depth": 8},
]


class Watched:
    """A stack, and the servicer of its coordinator."""

    def __init__(self, stack: LocalStack, servicer: GenerationServicer) -> None:
        self.stack, self.servicer = stack, servicer
        self.tally = servicer.totals.tally

    @property
    def num_disagreements(self) -> int:
        return self.servicer._verify.num_disagreements


@pytest.fixture(scope="module", params=["good", "hostile"])
def directories(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory: Path = tmp_path_factory.mktemp("heads")
    target = save_target(directory / "target")
    return target, save_heads(directory / "heads", target, is_hostile=request.param == "hostile")


@pytest.fixture(scope="module", params=[True, False], ids=["goes on", "waits"])
def watched(request: Any, directories: tuple[Path, Path]) -> Iterator[Watched]:
    target, heads = directories
    found: list[GenerationServicer] = []
    init = GenerationServicer.__init__

    def noted(self: GenerationServicer, *args: Any) -> None:
        init(self, *args)
        found.append(self)

    options = {"speculative_config": HEADS, "verify_ahead": request.param, "num_draft_tokens": "auto"}
    with (
        mock.patch.object(GenerationServicer, "__init__", noted),
        local_stack(target, coordinator_options=options, verify_options={"heads": str(heads)}) as stack,
    ):
        yield Watched(stack, found[0])


@pytest.mark.sample(4)
@pytest.mark.parametrize("params", KINDS)
def test_the_text_is_that_of_plain_decoding(watched: Watched, params: SamplingParams) -> None:
    """With every shape that may be asked for, in one stream and in several."""
    client, prompt = watched.stack.client, [5, 9, 11, 2, 7, 4]
    plain = client.generate(params=replace(params, draft="off"), prompt_token_ids=prompt)
    assert not plain.speculation.by_source
    num_begun = watched.tally.num_begun
    for shape in SHAPES:
        done = client.generate(params=replace(params, **shape), prompt_token_ids=prompt)  # type: ignore[arg-type]
        assert done.token_ids == plain.token_ids
        sources = [each.source for each in done.speculation.by_source]
        assert sources == ["heads"] or not (sources or shape), "what is chosen may be plain rounds"
    goes_on = watched.servicer._config.verify_ahead
    assert (watched.tally.num_begun > num_begun) == goes_on
    together = asyncio.run(_together(watched.stack.address, params, prompt, 6))
    assert {done.token_ids for done in together} == {plain.token_ids}
    assert watched.num_disagreements == 0
    watched.stack.assert_idle_within(2.0)


async def _together(address: str, params: SamplingParams, prompt: list[int], num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(
            *(client.generate(params=params, prompt_token_ids=prompt) for _ in range(num))
        )


# --- distributions ------------------------------------------------------------------------------------

NUM_STREAMS, NUM_TOKENS = 64, 50
FEW = {i: -100.0 for i in range(MARKOV_VOCAB_SIZE) if i not in (1, 4, 9)}
"""Biases that leave three tokens, so that three successive ones are tested for their joint distribution."""


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return markov_logits(markov_model())


@pytest.fixture(scope="module", params=["good", "hostile"])
def address(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of three processes, started as `specwire up --draft heads:DIR` does."""
    directory: Path = tmp_path_factory.mktemp("markov")
    target = save(markov_model(), directory / "target")
    heads = save_heads(directory / "heads", target, is_hostile=request.param == "hostile")
    with float32_processes(target, f"heads:{heads}", num_draft_tokens="2") as address:
        yield address


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(address: str, logits: torch.Tensor, rule: Rule) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=rule)
    completions = asyncio.run(_sample(address, params, NUM_STREAMS))
    assert sum(done.speculation.num_draft_tokens for done in completions) > NUM_STREAMS * NUM_TOKENS / 4
    assert fit_p_value(completions, logits, params) > FALSE_ALARM_RATE
    few = replace(params, logit_bias=FEW)
    joint = asyncio.run(_sample(address, few, NUM_STREAMS // 2))
    assert fit_p_value(joint, logits, few, num_before=2) > FALSE_ALARM_RATE


def test_tokens_a_pass(address: str, request: pytest.FixtureRequest) -> None:
    """Nearly all tokens of good heads are accepted, and of hostile ones none: the tests above have both."""
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


def test_control_typical_acceptance_is_caught(
    tmp_path: Path, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that is not exact shows: the test above can fail."""
    target = save(markov_model(), tmp_path / "target")
    heads = save_heads(tmp_path / "heads", target)
    monkeypatch.setattr(coordinator.generation, "acceptance", SimpleNamespace(accept=typical))
    monkeypatch.setattr(verify_service.own, "acceptance", SimpleNamespace(accept=typical))
    options = {"speculative_config": HEADS, "num_draft_tokens": "2"}
    with ExitStack() as running:
        stack = running.enter_context(
            local_stack(target, coordinator_options=options, verify_options={"heads": str(heads)})
        )
        params = SamplingParams(max_tokens=NUM_TOKENS, rule=Rule.REJECTION)
        completions = asyncio.run(_sample(stack.address, params, NUM_STREAMS))
    assert fit_p_value(completions, logits, params) < CLEARLY_WRONG
