"""Under a grammar a sampled proposal is waited for as long as its masks may take, which its tokens decide."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import coordinator.servicer
from coordinator.generation import Plan
from coordinator.length.draft_length import AdaptiveLength
from specwire import Grammar, Rule, SamplingParams
from specwire.engine.grammars.matcher import GrammarMatcher
from tests.support.harness import local_stack
from tests.support.languages import REGEX, save_speaker
from tests.support.pairs import markov_model


class Impatient(AdaptiveLength):
    """Would wait for nothing."""

    def plan(self) -> Plan:
        return Plan(2, patience_s=0.0)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.GUMBEL])
def test_slow_masks_make_no_proposal_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """Neither for the plan nor for the time-out; where tokens are matched both may end the wait."""
    target, draft = (
        save_speaker(markov_model(), tmp_path / "target"),
        save_speaker(markov_model(0.9), tmp_path / "draft"),
    )
    fill = GrammarMatcher.fill

    def slowly(self: GrammarMatcher, *arguments: Any) -> Any:
        time.sleep(0.1)
        return fill(self, *arguments)

    monkeypatch.setattr(coordinator.servicer, "AdaptiveLength", Impatient)
    params = SamplingParams(rule=rule, seed=1, max_tokens=8, grammar=Grammar(regex=REGEX))
    options = {"num_draft_tokens": "auto", "num_outcomes": "0", "draft_timeout_ms": 10.0}
    with local_stack(target, draft, coordinator_options=options) as stack:
        stack.client.generate(
            params=params, prompt_token_ids=[3]
        )  # the draft is proven, the grammar compiled
        monkeypatch.setattr(GrammarMatcher, "fill", slowly)
        done = stack.client.generate(params=params, prompt_token_ids=[3]).speculation
    num_drafted = sum(source.num_drafts for source in done.by_source)
    num_possible = done.num_rounds - 1  # of the last token there may be no draft
    assert (num_drafted >= num_possible) is not params.matches_tokens, done
