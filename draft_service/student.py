"""A copy of a draft that learns from the target's tokens, and gives what it has learnt to the draft."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draft_service.lessons import NUM_LABELS, Grade, Window
from specwire.engine.model.loading import is_quantised
from specwire.errors import ModelLoadError
from specwire.rule.transfer import to_device

WINDOWS_PER_STEP = 4
"""Gradients of so many windows are added up."""
_WEIGHTS = "*.safetensors*", "*.bin*"
_OWN_WEIGHTS = "model*.safetensors*", "pytorch_model*.bin*"
"""As transformers names those that it reads."""
_LEAST_TEMPERATURE = 0.25
"""Of the loss: its gradient grows as the temperature falls. Greedy requests have 1."""


class Student:
    """A float32 copy of the served model, with an optimiser.

    Two of a model's forms are at work: the served weights, which change in `publish` alone, and those that
    learn. In a test the served weights run through the copy's modules, which attend as transformers does.

    Args:
        model: the served one, with the engine's attention.
        rate: of the optimiser (AdamW).

    Raises:
        ModelLoadError: its weights cannot be changed.
    """

    def __init__(self, model: Any, rate: float) -> None:
        _check(model)
        self._served = model
        self._rate = rate
        self._model = copy.deepcopy(model).float().requires_grad_(requires_grad=True)
        self._model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._optimizer = self._new_optimizer()
        self._num_added_up = 0

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._model.parameters(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0)

    def study(self, window: Window, *, is_graded: bool) -> Grade | None:
        """Add the gradient of a window, after a test on it if it is to be graded; returns the grade."""
        with _learning():
            log_probs, labels = self._log_probs(window)
            grade = None
            if is_graded:
                with torch.no_grad():
                    served, _ = self._log_probs(window, dict(self._served.named_parameters()))
                    agreement, score = _scores(served, labels, window.temperature)
                    _, learnt = _scores(log_probs.detach(), labels, window.temperature)
                grade = Grade(window.num_labels, float(learnt - score), float(agreement))
            loss = F.nll_loss(log_probs, labels, reduction="sum") / (WINDOWS_PER_STEP * NUM_LABELS)
            loss.backward()  # type: ignore[no-untyped-call]
            self._num_added_up += 1
        return grade

    @property
    def is_step_due(self) -> bool:
        return self._num_added_up == WINDOWS_PER_STEP

    def step(self) -> bool:
        """Take a step; false if there was none, since the gradient is not finite."""
        with _learning():
            norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            is_finite = bool(norm.isfinite())
            if is_finite:
                self._optimizer.step()
            self._forget_gradients()
        return is_finite

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._num_added_up = 0

    def publish(self) -> None:
        """Serve what was learnt. The served tensors stay where they are, as a recorded graph needs them."""
        _copy(self._model, self._served)

    def go_back(self) -> None:
        """Learn on from the served weights."""
        _copy(self._served, self._model)
        with _learning():
            self._forget_gradients()
            self._optimizer = self._new_optimizer()

    def save(self, directory: Path, source: Path) -> None:
        """Write the served weights as a model, with all else of the directory that it was loaded from. A full
        disk leaves what was there, and files of others stay; weights that were read instead do not."""
        _copy(self._served, self._model)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory) as name:
            made = Path(name) / "model"
            shutil.copytree(source, made, ignore=_ignored(directory))
            self._model.to(self._served.dtype).save_pretrained(made)
            new = {path.name for path in made.iterdir()}
            shutil.copytree(made, directory, copy_function=os.replace, dirs_exist_ok=True)
        for old in (
            path for pattern in _OWN_WEIGHTS for path in directory.glob(pattern) if path.name not in new
        ):
            old.unlink()

    def _log_probs(self, window: Window, weights: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Of the next token before each label, float32 [num_labels, vocab_size]; and the labels."""
        device = self._model.device
        tokens = to_device(window.token_ids, device)
        inputs = {
            "input_ids": tokens[None, :-1],
            "position_ids": torch.arange(len(tokens) - 1, device=device)[None] + window.start,
            "use_cache": False,
        }
        if self._keeps_rows:
            inputs["logits_to_keep"] = window.num_labels
        output = torch.func.functional_call(self._model, weights or {}, (), inputs)
        logits = output.logits[0, -window.num_labels :].float()
        temperature = max(window.temperature, _LEAST_TEMPERATURE) if window.temperature else 1.0
        return (logits / temperature).log_softmax(dim=-1), tokens[-window.num_labels :]


def _ignored(directory: Path) -> Callable[[str, list[str]], set[str]]:
    """For `copytree`: weights, and the directory that is written to, which may be within the source."""
    weights = shutil.ignore_patterns(*_WEIGHTS)

    def of(place: str, names: list[str]) -> set[str]:
        own = {name for name in names if Path(place, name).resolve() == directory.resolve()}
        return weights(place, names) | own

    return of


@contextlib.contextmanager
def _learning() -> Iterator[None]:
    """The engine's thread runs in inference mode, whose tensors have no gradients."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


def _copy(source: Any, destination: Any) -> None:
    with _learning(), torch.no_grad():
        for ours, theirs in zip(source.parameters(), destination.parameters(), strict=True):
            theirs.copy_(ours)


def _scores(log_probs: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Agreement and quadratic score, see `Grade`; sums over the labels."""
    if temperature == 0:
        hits = (log_probs.argmax(dim=-1) == labels).sum()
        return hits, 2 * hits - len(labels)
    probs = log_probs.exp()
    agreement = probs.gather(1, labels[:, None]).sum()
    return agreement, 2 * agreement - probs.square().sum()


def _check(model: Any) -> None:
    if is_quantised(model.config):
        raise ModelLoadError("--learn: quantised weights cannot be changed")
    if any("forward" in vars(module) for module in model.modules()):
        raise ModelLoadError("--learn: the weights are packed for this processor, and cannot be changed")
