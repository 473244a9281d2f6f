"""Scores that are no numbers: a target's end the request that met them, a draft's are a lost draft."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from specwire import Completion, Rule, SamplingParams
from specwire.engine.emulated import EmulatedModel
from specwire.errors import InternalError
from specwire.support import IntArray
from tests.support.harness import LocalStack, local_stack

HOT = 60
"""After this token the target's logit of the same token is near the largest number of float32."""


@pytest.fixture(params=list(Rule), ids=lambda rule: rule.name.lower())
def rule(request: pytest.FixtureRequest) -> Rule:
    return request.param


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    log_probs = EmulatedModel.log_probs

    def strange(model: EmulatedModel, positions: IntArray, before: IntArray) -> npt.NDArray[np.float32]:
        out = log_probs(model, positions, before)
        if model.alpha < 1:
            out[:] = np.nan
        else:
            out[np.asarray(before) == HOT, HOT] = 1e37
        return out

    monkeypatch.setattr(EmulatedModel, "log_probs", strange)
    with local_stack("emulated:step_ms=0", "emulated:step_ms=0,alpha=0.8") as running:
        yield running


def generate(stack: LocalStack, rule: Rule, penalty: float, prompt: list[int]) -> Completion:
    params = SamplingParams(max_tokens=8, rule=rule, seed=3, repetition_penalty=penalty)
    return stack.client.generate(prompt_token_ids=prompt, params=params)


def test_a_penalty_that_leads_out_of_the_numbers(stack: LocalStack, rule: Rule) -> None:
    assert generate(stack, rule, 1.0, [HOT]).token_ids[0] == HOT
    with pytest.raises(InternalError, match="not finite"):
        generate(stack, rule, 0.01, [HOT])
    assert len(generate(stack, rule, 0.01, [1, 2]).token_ids) == 8


def test_rows_that_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's logits after draft tokens that it never emits: plain decoding does not see them."""
    log_probs = EmulatedModel.log_probs

    def strange(model: EmulatedModel, positions: IntArray, before: IntArray) -> npt.NDArray[np.float32]:
        out = log_probs(model, positions, before)
        if model.alpha == 1:
            out[np.asarray(before) >= model.vocab_size // 2] = np.nan
        return out

    monkeypatch.setattr(EmulatedModel, "log_probs", strange)
    options = {"num_draft_tokens": "4", "num_outcomes": "0"}
    with local_stack(
        "emulated:step_ms=0", "emulated:step_ms=0,alpha=0.5", coordinator_options=options
    ) as stack:
        for rule in Rule:
            params = SamplingParams(max_tokens=40, rule=rule, seed=3)
            done = stack.client.generate(prompt_token_ids=[1, 2], params=params)
            assert len(done.token_ids) == 40
            assert done.speculation.num_draft_tokens > done.speculation.num_accepted_tokens > 0


def test_a_draft_whose_logits_are_no_numbers(stack: LocalStack, rule: Rule) -> None:
    done = generate(stack, rule, 1.0, [1, 2])
    assert len(done.token_ids) == 8
    assert done.speculation.draft_unavailable
    assert not done.speculation.num_draft_tokens
