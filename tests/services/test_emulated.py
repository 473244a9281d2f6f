"""Emulated devices: their acceptance is known; `test_bench_serve` has their times."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specwire import ModelLoadError
from specwire.engine.emulated import EmulatedModel
from tests.support.statistics import FALSE_ALARM_RATE


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
