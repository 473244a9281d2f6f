"""Passes of our own through a Llama's layers, and those of its like: where they run, and where they do not.

`test_runner.py`, `test_trees.py` and all tests of texts compare them with transformers' own passes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specwire.engine.batch import Feed
from specwire.engine.model.runner import ModelRunner, relative_error
from tests.support.tiny_models import build

YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}


def runner_of(model: Any, **options: Any) -> ModelRunner:
    return ModelRunner(model, num_pages=32, page_size=16, **options)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 20}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
    ids=["biases", "rotation", "mistral", "qwen2", "qwen3"],
)
def test_every_part_of_a_model_is_run(family: str, fields: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        runner = runner_of(build(family, **fields).to(dtype))
        assert runner._direct is not None
        with runner.new_sequence() as cache:
            direct = runner.forward([Feed(cache, range(60), 60)])
            cache.truncate(0)
            runner._direct = None
            wanted = runner.forward([Feed(cache, range(60), 60)])
        assert torch.equal(direct, wanted) or dtype == torch.float32
        assert relative_error(direct, wanted) < 1e-5


@pytest.mark.parametrize("case", ["family", "a hook", "rotation by length", "one size"])
def test_other_models_are_run_by_transformers(case: str) -> None:
    fields: dict[str, Any] = {"rope_parameters": DYNAMIC} if case == "rotation by length" else {}
    model: Any = build("gemma2" if case == "family" else "llama", **fields)
    if case == "a hook":
        model.model.norm.register_forward_hook(lambda *_: None)
    assert runner_of(model, batch_invariant=case == "one size")._direct is None


def test_a_model_that_computes_something_else_is_not_run_directly(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    layer = model.model.layers[1].mlp
    theirs = layer.forward
    layer.forward = lambda states: 1.02 * theirs(states)  # as a later version of transformers might
    assert runner_of(model)._direct is None
    assert "direct passes differ by 0.0" in caplog.text


def test_weights_that_change_are_read() -> None:
    model = build("llama")
    runner = runner_of(model)
    with torch.inference_mode():
        before = runner._trial(runner._run_directly)
        for weight in model.parameters():
            weight.mul_(1.1)
        after = runner._trial(runner._run_directly)
        assert relative_error(after, before) > 0.01
        assert relative_error(after, runner._trial()) < 1e-5
