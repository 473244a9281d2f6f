"""Scores that are no numbers: a target's end the request that met them, a draft's are a lost draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


Scores = npt.NDArray[np.float32]


def changed(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[EmulatedModel, Scores, IntArray], None]
) -> None:
    """From now on, what models score after tokens is changed."""
    log_probs = EmulatedModel.log_probs

    def strange(model: EmulatedModel, positions: IntArray, before: IntArray) -> Scores:
        out = log_probs(model, positions, before)
        change(model, out, np.asarray(before))
        return out

    monkeypatch.setattr(EmulatedModel, "log_probs", strange)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    def strange(model: EmulatedModel, out: Scores, before: IntArray) -> None:
        if model.alpha < 1:
            out[:] = np.nan
        else:
            out[before == HOT, HOT] = 1e37

    changed(monkeypatch, strange)
    with local_stack("emulated:step_ms=0", "emulated:step_ms=0,alpha=0.8") as running:
        yield running


def generate(stack: LocalStack, rule: Rule, penalty: float, prompt: list[int]) -> Completion:
    params = SamplingParams(max_tokens=8, rule=rule, seed=3, repetition_penalty=penalty)
    return stack.client.generate(prompt_token_ids=prompt, params=params)


@pytest.mark.parametrize("rule", list(Rule))
def test_a_penalty_that_leads_out_of_the_numbers(stack: LocalStack, rule: Rule) -> None:
    """Beside a draft whose logits are no numbers, which is a lost draft."""
    assert generate(stack, rule, 1.0, [HOT]).token_ids[0] == HOT
    with pytest.raises(InternalError, match="not finite"):
        generate(stack, rule, 0.01, [HOT])
    for penalty in (0.01, 1.0):
        done = generate(stack, rule, penalty, [1, 2])
        assert len(done.token_ids) == 8
        assert done.speculation.draft_unavailable
        assert not done.speculation.num_draft_tokens


def test_rows_that_are_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's logits after draft tokens that it never emits: plain decoding does not see them."""

    def strange(model: EmulatedModel, out: Scores, before: IntArray) -> None:
        if model.alpha == 1:
            out[before >= model.vocab_size // 2] = np.nan

    changed(monkeypatch, strange)
    options = {"num_draft_tokens": "4", "num_outcomes": "0"}
    draft = "emulated:step_ms=0,alpha=0.5"
    with local_stack("emulated:step_ms=0", draft, coordinator_options=options) as stack:
        for rule in Rule:
            params = SamplingParams(max_tokens=40, rule=rule, seed=3)
            done = stack.client.generate(prompt_token_ids=[1, 2], params=params)
            assert len(done.token_ids) == 40
            assert done.speculation.num_draft_tokens > done.speculation.num_accepted_tokens > 0
