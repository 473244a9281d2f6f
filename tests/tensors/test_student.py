"""The copy of a draft that learns: what it changes, when, and in which weights."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draft_service.lessons import Grade, Window
from draft_service.student import WINDOWS_PER_STEP, Student
from specwire.engine.batch import Feed
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError
from tests.support import tiny_models


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    """As on an engine's thread."""
    with torch.inference_mode():
        yield


@torch.inference_mode(mode=False)
def runner(family: str = "llama", dtype: torch.dtype = torch.float32) -> ModelRunner:
    return ModelRunner(tiny_models.build(family).to(dtype), num_pages=32)


@torch.inference_mode(mode=False)
def student_of(served: ModelRunner, rate: float = 0.01) -> Student:
    return Student(served.model, rate)


def window(temperature: float = 1.0, start: int = 0) -> Window:
    """A text that repeats itself."""
    return Window(np.array([5, 9, 11, 2] * 8), start, 24, temperature)


def logits(served: ModelRunner) -> torch.Tensor:
    with served.new_sequence() as cache:
        return served.forward([Feed(cache, window().token_ids, 24)])


def study(student: Student, num_steps: int, temperature: float = 1.0) -> None:
    for _ in range(num_steps * WINDOWS_PER_STEP):
        student.study(window(temperature), is_graded=False)
        if student.is_step_due:
            assert student.step()


def graded(student: Student, temperature: float = 1.0, start: int = 0) -> Grade:
    found = student.study(window(temperature, start), is_graded=True)
    assert found is not None
    return found


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_served_weights_change_in_publish_alone(family: str, temperature: float) -> None:
    """In place, so that what refers to them sees it; and then they know the text."""
    served = runner(family)
    student, before = student_of(served), logits(served)
    places = [weight.data_ptr() for weight in served.model.parameters()]
    study(student, 12, temperature)
    assert torch.equal(logits(served), before)
    grade = graded(student, temperature)
    assert grade.gain > 0.2 * grade.num_labels
    student.publish()
    assert [weight.data_ptr() for weight in served.model.parameters()] == places
    after = graded(student, temperature)
    assert after.agreement > grade.agreement + 0.2 * grade.num_labels
    assert after.gain == pytest.approx(0, abs=1e-3)
    hits = logits(served)[:-1].argmax(dim=-1).tolist() == window().token_ids[-23:].tolist()
    assert hits or temperature > 0


def test_the_tests_probabilities_are_those_that_the_engine_computes() -> None:
    """By transformers' own attention; a window that begins later can be graded too."""
    served, token_ids = runner("gpt2"), window().token_ids
    student = student_of(served)
    grade = graded(student, 0.6)
    with served.new_sequence() as cache:
        rows = served.forward([Feed(cache, token_ids[:-1], 24)])
    probs = (rows / 0.6).softmax(dim=-1).gather(1, torch.from_numpy(token_ids[-24:])[:, None])
    assert grade.agreement == pytest.approx(float(probs.sum()), abs=1e-3)
    assert grade.gain == pytest.approx(0, abs=1e-3)
    assert graded(student, 0.6, start=40)


def test_going_back() -> None:
    """To the served weights, gradients and the optimiser's memory forgotten."""
    student = student_of(runner())
    study(student, 8)
    student.study(window(), is_graded=False)
    student.go_back()
    assert graded(student).gain == pytest.approx(0, abs=1e-3)
    assert not student.is_step_due


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    served = runner()
    student = student_of(served)
    with torch.inference_mode(mode=False), torch.no_grad():
        student._model.lm_head.weight[0, 0] = float("nan")
    for _ in range(WINDOWS_PER_STEP):
        student.study(window(), is_graded=False)
    assert not student.step()
    student.go_back()
    study(student, 1)


def test_half_precision_is_served_from_full_precision_learning() -> None:
    """Steps that are smaller than bfloat16 can tell add up."""
    served = runner(dtype=torch.bfloat16)
    student, before = student_of(served, 1e-4), logits(served)
    study(student, 15)
    student.publish()
    assert served.model.dtype is torch.bfloat16
    assert not torch.equal(logits(served), before)


def test_what_is_saved_is_a_model(tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        source = tiny_models.save(tiny_models.build("llama"), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    served = runner()
    student = student_of(served)
    study(student, 4)
    student.publish()
    study(student, 4)
    student.save(tmp_path / "out", source)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in served.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_a_full_disk_leaves_what_was_saved_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode(mode=False):
        source = tiny_models.save(tiny_models.build("llama"), tmp_path / "source")
    student, out = student_of(runner()), tmp_path / "out"
    student.save(out, source)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    study(student, 4)
    student.publish()
    (source / "config.json").write_text("{}")

    def fails(model: Any, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(student._model), "save_pretrained", fails)
    with pytest.raises(OSError, match="No space left"):
        student.save(out, source)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_files_of_others_stay_and_old_weights_do_not(tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        source = tiny_models.save(tiny_models.build("llama"), tmp_path / "source")
    student, out = student_of(runner()), tmp_path / "out"
    out.mkdir()
    others = {"data.bin", "train.binary", "embeddings.safetensors"}
    for name in others | {
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    }:
        (out / name).write_text("mine")
    student.save(out, source)
    new = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == new | others


def test_it_may_be_saved_within_the_model_that_it_was(tmp_path: Path) -> None:
    with torch.inference_mode(mode=False):
        source = tiny_models.save(tiny_models.build("llama"), tmp_path / "source")
    out = source / "learnt"
    for _ in range(2):
        student_of(runner()).save(out, source)
        assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()} - {"learnt"}


def test_packed_weights_are_refused() -> None:
    """They are copies in another order, which no change of the weights reaches."""
    served = runner()
    linear = next(module for module in served.model.modules() if isinstance(module, nn.Linear))
    linear.forward = linear.forward  # type: ignore[method-assign]
    with pytest.raises(ModelLoadError, match="--learn: the weights are packed"):
        student_of(served)
