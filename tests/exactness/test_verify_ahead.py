"""Rounds that the target begins by itself do not change the distribution, since the coordinator judges them.

As in `test_wire_distributions.py`, over real services: the target's distribution depends on the last token
alone, and χ² compares, here by the joint distribution of three successive tokens. Passes of the target take
so long that prepared proposals arrive before their end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import coordinator.generation
import verify_service.ahead
from coordinator.servicer import GenerationServicer
from specwire import Completion, Rule, SamplingParams
from specwire.core import Outcome, Proposal, Verdict
from specwire.rule import acceptance
from tests.support.harness import LocalStack, local_stack, started_coordinators
from tests.support.markov_distribution import FEW, PROMPT, fit_p_value
from tests.support.pairs import save_markov_pair
from tests.support.statistics import FALSE_ALARM_RATE
from tests.support.together import sampled

NUM_GENERATIONS, NUM_TOKENS = 2, 300


class Running(NamedTuple):
    """A stack, and its coordinator."""

    stack: LocalStack
    servicer: GenerationServicer


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with (
        started_coordinators() as found,
        local_stack(
            *save_markov_pair(tmp_path_factory.mktemp("markov"), 0.9),
            coordinator_options={"num_outcomes": "16", "num_draft_tokens": "2"},
            verify_options={"least_pass_ms": 40.0},
        ) as stack,
    ):
        yield Running(stack, found[0])


def sample(address: str, rule: Rule) -> list[Completion]:
    return sampled(address, of(rule), range(NUM_GENERATIONS), PROMPT)


def of(rule: Rule) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, rule=rule, logit_bias=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(running: Running, logits: torch.Tensor, rule: Rule) -> None:
    tally = running.servicer.totals.tally
    num_begun, num_rounds = tally.num_begun, tally.num_rounds
    completions = sample(running.stack.address, rule)
    assert tally.num_begun - num_begun > (tally.num_rounds - num_rounds) / 4
    assert fit_p_value(completions, logits, of(rule), num_before=2) > FALSE_ALARM_RATE


class Biased:
    """A target that comes to outcomes of its own: where the rule says 9, it claims 5, which FEW excludes."""

    def __init__(self) -> None:
        self.claimed: dict[tuple[int, int], Outcome] = {}

    def claim(self, proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
        own = acceptance.accept(proposal, verdict, params, seed)
        claimed = replace(own, next_token=5 if own.next_token == 9 else own.next_token)
        self.claimed[seed, proposal.base_len] = claimed
        return claimed

    def accept(self, proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
        """Of a coordinator that takes the target's word for it."""
        own = acceptance.accept(proposal, verdict, params, seed)
        return self.claimed.get((seed, proposal.base_len), own)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Biased:
    made = Biased()
    monkeypatch.setattr(verify_service.ahead, "acceptance", SimpleNamespace(accept=made.claim))
    return made


@pytest.mark.slow
def test_other_outcomes_than_the_rules_change_nothing(
    running: Running, logits: torch.Tensor, target: Biased
) -> None:
    """The coordinator judges as ever, and what the target claims reaches no client."""
    completions = sample(running.stack.address, Rule.REJECTION)
    assert any(claimed.next_token == 5 for claimed in target.claimed.values())
    assert not any(5 in done.token_ids for done in completions)
    assert fit_p_value(completions, logits, of(Rule.REJECTION), num_before=2) > FALSE_ALARM_RATE


@pytest.mark.slow
def test_control_believed_they_would(
    running: Running, target: Biased, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a coordinator that does not judge, what the target claims is what clients get."""
    monkeypatch.setattr(coordinator.generation, "acceptance", target)
    completions = sample(running.stack.address, Rule.REJECTION)
    assert any(5 in done.token_ids for done in completions)
