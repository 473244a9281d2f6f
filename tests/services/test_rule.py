"""Which rule a request runs under when it names none; the completion says it."""

from __future__ import annotations

from typing import Any

import pytest

from specwire import Rule, SamplingParams
from specwire.config.link import Link
from tests.support.harness import local_stack

TARGET = "emulated:step_ms=10"
DRAFT = "emulated:step_ms=1,alpha=0.8,runner_up=0.55"
PROMPT = [1, 2, 3]
PREPARING = {"num_draft_tokens": "3", "num_outcomes": "16"}


def rules(params: SamplingParams, *, options: dict[str, Any], rtt_ms: float = 0.0) -> list[Rule]:
    """Of two generations, one after the other."""
    link = Link(rtt_ms=rtt_ms) if rtt_ms else None
    with local_stack(TARGET, DRAFT, coordinator_options=options, draft_link=link) as stack:
        return [stack.client.generate(params=params, prompt_token_ids=PROMPT).rule for _ in range(2)]


@pytest.mark.parametrize("rule", list(Rule))
def test_what_a_request_names_holds(rule: Rule) -> None:
    other = next(each for each in Rule if each is not rule)
    params = SamplingParams(max_tokens=8, seed=3, rule=rule)
    assert rules(params, options={"rule": other.value}) == [rule, rule]


@pytest.mark.parametrize("rule", list(Rule))
def test_what_the_server_was_told_holds_otherwise(rule: Rule) -> None:
    assert rules(SamplingParams(max_tokens=8, seed=3), options={"rule": rule.value}) == [rule, rule]


def test_a_seed_fixes_the_text() -> None:
    assert rules(SamplingParams(max_tokens=8, seed=3), options={}) == [Rule.GUMBEL, Rule.GUMBEL]


@pytest.mark.slow
def test_a_far_draft_is_coupled_once_that_is_known() -> None:
    free = SamplingParams(max_tokens=60)
    assert rules(free, options=PREPARING, rtt_ms=40) == [Rule.BLOCK, Rule.GUMBEL]
    lockstep = PREPARING | {"num_outcomes": "0"}
    assert rules(free, options=lockstep, rtt_ms=40) == [Rule.BLOCK, Rule.BLOCK]
