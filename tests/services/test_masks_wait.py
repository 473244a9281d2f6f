"""Under a grammar a sampled proposal is waited for as long as its masks may take, which its tokens decide."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import coordinator.servicer
from coordinator.generation import Plan
from coordinator.length.planners import AdaptiveLength
from coordinator.peers import drafter
from coordinator.peers.draft_sequence import DraftSequence
from coordinator.peers.replicas import Replica
from specwire import Grammar, Rule, SamplingParams
from specwire.config.link import Link
from specwire.engine.grammars.matcher import GrammarMatcher
from tests.support.harness import local_stack
from tests.support.languages import REGEX, save_speaker
from tests.support.pairs import markov_model
from tests.support.processes import wait_until


class Impatient(AdaptiveLength):
    """Would wait for nothing."""

    def plan(self) -> Plan:
        return Plan(2, patience_s=0.0)


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Target and draft."""
    return [
        save_speaker(markov_model(*spread), tmp_path / name)
        for name, spread in (("target", ()), ("draft", (0.9,)))
    ]


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: masks take 100 ms from now on."""
    fill = GrammarMatcher.fill

    def slowly(self: GrammarMatcher, *arguments: Any) -> Any:
        time.sleep(0.1)
        return fill(self, *arguments)

    monkeypatch.setattr(coordinator.servicer, "AdaptiveLength", Impatient)
    return lambda: monkeypatch.setattr(GrammarMatcher, "fill", slowly)


OPTIONS = {"num_draft_tokens": "auto", "num_outcomes": "0", "draft_timeout_ms": 10.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.GUMBEL])
def test_slow_masks_make_no_proposal_late(
    models: list[Path], slow_masks: Callable[[], None], rule: Rule
) -> None:
    """Neither for the plan nor for the time-out; where tokens are matched both may end the wait."""
    params = SamplingParams(rule=rule, seed=1, max_tokens=8, grammar=Grammar(regex=REGEX))
    with local_stack(*models, coordinator_options=OPTIONS) as stack:
        generate = partial(stack.client.generate, params=params, prompt_token_ids=[3])
        generate()  # the draft is proven, the grammar compiled
        slow_masks()
        done = generate().speculation
    num_drafted = sum(source.num_drafts for source in done.by_source)
    num_possible = done.num_rounds - 1  # of the last token there may be no draft
    assert (num_drafted >= num_possible) is not params.matches_tokens, done


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.GUMBEL])
def test_no_late_proposal_is_kept(
    models: list[Path], slow_masks: Callable[[], None], monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    """Neither past the longest wait, nor from a draft that has not answered since it was lost."""
    num_late, received = [0, 0], DraftSequence.received

    def noted(self: DraftSequence, answer: Any, num_bytes: int) -> None:
        num_late[bool(answer.proposal.token_ids)] += self.error is None and self.late_s > 0
        received(self, answer, num_bytes)

    monkeypatch.setattr(DraftSequence, "received", noted)
    params = SamplingParams(rule=rule, seed=1, max_tokens=8, grammar=Grammar(regex=REGEX))
    options = OPTIONS | {"draft_timeout_ms": 60.0}
    with local_stack(*models, coordinator_options=options, draft_link=Link()) as stack:
        generate = partial(stack.client.generate, params=params, prompt_token_ids=[3])
        generate()
        slow_masks()
        with monkeypatch.context() as patch:
            patch.setattr(drafter, "LONGEST_MASK_S", 0.01)
            patch.setattr(Replica, "longest_s", lambda *_: 0.0)
            reason = generate().speculation.draft_unavailable
        assert params.matches_tokens or "no proposal within" in reason
        assert stack.draft_proxy is not None
        stack.draft_proxy.cut()
        num_late[0] = 0
        wait_until(lambda: bool(generate() and sum(num_late)), 30.0)
    assert (num_late[1] > 0) is params.matches_tokens
