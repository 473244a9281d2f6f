"""Functions and layers that run as one launch, or as few, compute what they compute otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specwire.core import SamplingParams
from specwire.engine.model.compiled import CompiledLayers, join_projections
from specwire.engine.model.runner import ModelRunner, relative_error
from specwire.rule import captured, choices, random, rows, sampling
from specwire.rule.columns import Encoded, Row, Rows
from tests.support.parameters import EACH_WARP
from tests.support.tiny_models import build


class Counting:
    """Runs what was captured on what its memory has then, and counts both."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.num_captured += 1

        def replay() -> Any:
            self.num_replayed += 1
            return run()

        return replay


def _sums(numbers: Tensor, scales: Tensor, *, power: int) -> tuple[Tensor, Tensor]:
    return (numbers**power).sum(dim=-1) * scales, numbers.argmax(dim=-1)


def test_a_size_is_captured_when_it_is_used_again() -> None:
    replay = Counting()
    function = captured.Captured(_sums, replay)
    for num_rows, power in [(3, 2), (3, 2), (4, 2), (3, 3), (1, 2), (1, 2), (3, 2), (0, 2)]:
        inputs = torch.randn(num_rows, 7), torch.randn(num_rows)
        for ours, theirs in zip(function(*inputs, power=power), _sums(*inputs, power=power), strict=True):
            assert torch.equal(ours, theirs)
    assert replay.num_captured == 2  # up to four rows, and one; the other power was asked for once
    assert replay.num_replayed == 4


def test_large_inputs_and_what_cannot_be_captured_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
            raise RuntimeError("no graphs")

    inputs = torch.randn(3, 7), torch.randn(3)
    wanted = _sums(*inputs, power=2)
    replay = Counting()
    monkeypatch.setattr(captured, "MOST_ELEMENTS", 27)
    for function in (captured.Captured(_sums, Broken()), captured.Captured(_sums, replay)):
        for _ in range(4):
            assert torch.equal(function(*inputs, power=2)[0], wanted[0])
    assert replay.num_captured == 0


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_the_functions_that_are_captured_are_pure_in_their_rows(num_rows: int) -> None:
    """What lies in further rows of the memory changes nothing."""
    log_probs = torch.randn(num_rows, 50).log_softmax(-1)
    uniforms = torch.rand(num_rows, dtype=torch.float64)
    keys = torch.tensor([[7, 100 + i] for i in range(num_rows)])
    for function, inputs, fixed in (
        (rows.drawn_on_device, (log_probs, uniforms), {"mass": 0.9, "max_support": 20}),
        (random._gumbel_of_rows, (keys,), {"vocab_size": 50}),
        (choices.likeliest_on_device, (log_probs,), {"most": 4}),
        (choices.likeliest_on_device, (log_probs,), {"most": 1}),
    ):
        alone = function(*inputs, **fixed)
        one = captured.Captured(function, captured.EagerReplay())
        for _ in range(3):
            for ours, theirs in zip(one(*inputs, **fixed), alone, strict=True):
                assert torch.equal(ours, theirs)


def test_compiled_layers_compute_the_same_and_can_be_undone() -> None:
    model = build("llama", num_hidden_layers=1)
    runner = ModelRunner(model, num_pages=32, page_size=16, compiles=True)
    with torch.inference_mode():
        expected = runner._trial()
        assert join_projections([*runner._layers]) == 1
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        layers = CompiledLayers(runner.model, [*runner._layers], backend="eager")
        assert relative_error(runner._trial(), expected) < 1e-5
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        assert num_graphs == 8  # two frames of a layer on each side of attention, for one token and for more
        layers.undo()
        assert relative_error(runner._trial(), expected) < 1e-5


@pytest.mark.parametrize(("name", "num_joined"), [("llama", 2), ("qwen2", 2), ("gpt2", 0)])
def test_joined_projections_compute_the_same_from_the_same_parameters(name: str, num_joined: int) -> None:
    model = build(name)
    runner = ModelRunner(model, num_pages=32, page_size=16, compiles=True)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with torch.inference_mode():
        expected = runner._trial()
        assert join_projections([*runner._layers]) == num_joined
        assert relative_error(runner._trial(), expected) < 1e-5
        for attention in list(runner._layers)[:num_joined]:
            first, second = (getattr(attention, name) for name in ("q_proj", "k_proj"))
            states = torch.randn(1, 3, first.in_features)
            first(states)
            wanted = torch.nn.functional.linear(states + 1, second.weight, second.bias)
            assert relative_error(second(states + 1)[0], wanted[0]) < 1e-5, "of what it has read"
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_layers_that_cannot_be_compiled_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    failing = functools.partial(CompiledLayers, backend=backend)
    monkeypatch.setattr("specwire.engine.model.runner.CompiledLayers", failing)
    runner = ModelRunner(build("llama"), num_pages=32, page_size=16, compiles=True)
    with torch.inference_mode():
        expected = runner._trial()
        runner.warm()
        assert "not compiled" in caplog.text
        assert relative_error(runner._trial(), expected) < 1e-5


def test_warps_on_the_device_are_those_of_the_host() -> None:
    all_params = [
        *(SamplingParams(**each) for each in EACH_WARP[1:]),  # a temperature alone: where sums of all reach 1
        SamplingParams(top_k=5),
        SamplingParams(temperature=0.5, top_k=20, top_p=0.9),
        SamplingParams(),
    ]
    logits = torch.randn(len(all_params), 60, generator=torch.Generator().manual_seed(3)) * 3
    expected = sampling.apply_warps(logits, Rows.of([Row(params, 0, (), 5, 1) for params in all_params]))
    warps = torch.tensor([Encoded.of(params, 1).warps for params in all_params])
    torch.testing.assert_close(sampling.warped_on_device(logits, warps), expected)
