"""Emulated devices: known acceptance under every rule, known costs, many streams."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specwire import ModelLoadError, SamplingParams
from specwire.engine.emulated import EmulatedModel
from tests.support.harness import local_stack
from tests.support.statistics import FALSE_ALARM_RATE

PROMPT = [1, 2, 3]


def test_the_draft_agrees_with_probability_alpha_and_else_never() -> None:
    target, draft = EmulatedModel(), EmulatedModel(alpha=0.8)
    positions, before = np.arange(20_000), np.random.default_rng(0).integers(0, 32, 20_000)
    agrees = draft.agrees(positions, before)
    assert stats.binomtest(int(agrees.sum()), len(agrees), 0.8).pvalue > FALSE_ALARM_RATE
    target_probs, draft_probs = (np.exp(model.log_probs(positions, before)) for model in (target, draft))
    np.testing.assert_allclose(target_probs.sum(axis=1), 1, atol=1e-6)
    overlap = np.minimum(target_probs, draft_probs).sum(axis=1)
    np.testing.assert_allclose(overlap[agrees], 1, atol=1e-6)
    np.testing.assert_array_equal(overlap[~agrees], 0)


@pytest.mark.parametrize(
    "source", ["emulated:speed=3", "emulated:alpha=2", "emulated:vocab_size=7", "emulated:alpha"]
)
def test_what_it_does_not_know_is_refused(source: str) -> None:
    with pytest.raises(ModelLoadError, match="emulated:"):
        EmulatedModel.parse(source)


@pytest.mark.serial
def test_a_pass_takes_the_time_that_was_set() -> None:
    params = SamplingParams(max_tokens=20, num_draft_tokens=0)
    with local_stack("emulated:step_ms=20") as stack:
        done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert done.timing.total_ms >= 20 * 20
    # Passes go on by themselves: what the coordinator does between two answers is not waited for.
    assert 20 * 20 * 0.9 < done.timing.verify_ms < 20 * 20 * 1.5
