"""A paced model: the same text, in passes that take at least as long as was set.

An emulated one: its acceptance; `test_bench_serve` has its times.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specwire import ModelLoadError, Rule, SamplingParams
from specwire.config.services import VerifyConfig
from specwire.config.stack import StackConfig
from specwire.engine import emulated
from specwire.engine.emulated import EmulatedModel
from specwire.errors import ConfigError
from tests.support.harness import local_stack
from tests.support.pairs import save_good_draft, save_target
from tests.support.statistics import FALSE_ALARM_RATE

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=12, seed=3, rule=Rule.GUMBEL, ignore_eos=True)
LEAST_MS = 20


@pytest.mark.parametrize("inner", ["", "ngram"])
def test_both_services_say_what_passes_cost(inner: str, tmp_path: Path) -> None:
    """As measured at load. A draft with a drafter of its own says nothing: a token is not a pass there."""
    models = save_target(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    paces: Any = [{"least_pass_ms": LEAST_MS}, {"least_pass_ms": LEAST_MS / 2, "inner": inner}]
    with local_stack(*models, verify_options=paces[0], draft_options=paces[1]) as stack:
        target, draft = stack.client.get_model_info()
    assert draft is not None
    found = [info.costs and info.costs.pass_ns(1, 1) / 1e6 for info in (target, draft)]
    expected = [LEAST_MS, None if inner else LEAST_MS / 2]
    assert found == [each and pytest.approx(each, rel=0.3) for each in expected]


def test_the_text_is_the_same_and_every_pass_takes_its_time(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target")
    with local_stack(target) as stack:
        expected = stack.client.generate(params=PARAMS, prompt_token_ids=PROMPT)
    with local_stack(target, verify_options={"least_pass_ms": LEAST_MS}) as stack:
        done = stack.client.generate(params=PARAMS, prompt_token_ids=PROMPT)
        assert stack.client.get_model_info()[0].least_pass_ms == LEAST_MS
    assert done.token_ids == expected.token_ids
    assert done.speculation.num_rounds == 12
    assert done.timing.verify_ms >= 12 * LEAST_MS


class Clock:
    """Time that passes while a runner works or sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s.append(seconds)


def test_what_is_left_is_slept_and_nothing_where_the_pass_was_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)

    def run(feeds: Any, question: float, decide: Any) -> str:
        clock.now_s += question
        return "answer"

    runner = SimpleNamespace(run=run, end_step=lambda: clock.sleep(0.5))
    emulated.pace(runner, least_pass_s=4.0)
    for pass_s, expected_s in ((1.0, 3.0), (4.0, 0.0), (9.0, 0.0)):
        assert runner.run([], pass_s, None) == "answer"
        runner.end_step()
        assert clock.slept_s[-2:] == [expected_s, 0.5]


@pytest.mark.parametrize("kind", [VerifyConfig, StackConfig])
@pytest.mark.parametrize("least_pass_ms", [-1.0, float("inf"), float("nan")])
def test_a_time_that_cannot_be(kind: Any, least_pass_ms: float) -> None:
    with pytest.raises(ConfigError, match=f"--least-pass-ms {least_pass_ms}: must be a number in"):
        kind(least_pass_ms=least_pass_ms)


# --- emulated devices ----------------------------------------------------------------------------------


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
