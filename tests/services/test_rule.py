"""Which rule a request runs under when it names none; the completion says it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specwire import Rule, SamplingParams
from specwire.config.link import Link
from tests.support.harness import local_stack

TARGET = "emulated:step_ms=10"
DRAFT = "emulated:step_ms=1,alpha=0.8,runner_up=0.55"
PROMPT = [1, 2, 3]
PREPARING = {"num_draft_tokens": "3", "num_outcomes": "16"}


def rules(*params: SamplingParams, options: dict[str, Any], rtt_ms: float = 0.0) -> list[Rule]:
    """Of generations, one after the other."""
    link = Link(rtt_ms=rtt_ms) if rtt_ms else None
    with local_stack(TARGET, DRAFT, coordinator_options=options, draft_link=link) as stack:
        return [stack.client.generate(params=each, prompt_token_ids=PROMPT).rule for each in params]


@pytest.mark.parametrize(("rule", "other"), [*zip(Rule, [*Rule][1:] + [*Rule][:1], strict=True)])
def test_what_a_request_names_holds_and_otherwise_what_the_server_was_told(rule: Rule, other: Rule) -> None:
    free = SamplingParams(max_tokens=8, seed=3)
    assert rules(free, replace(free, rule=other), options={"rule": rule.value}) == [rule, other]


def test_a_seed_fixes_the_text() -> None:
    assert rules(SamplingParams(max_tokens=8, seed=3), options={}) == [Rule.GUMBEL]


@pytest.mark.slow
def test_a_far_draft_is_coupled_once_that_is_known() -> None:
    free = SamplingParams(max_tokens=60)
    assert rules(free, free, options=PREPARING, rtt_ms=40) == [Rule.BLOCK, Rule.GUMBEL]
    lockstep = PREPARING | {"num_outcomes": "0"}
    assert rules(free, free, options=lockstep, rtt_ms=40) == [Rule.BLOCK, Rule.BLOCK]
