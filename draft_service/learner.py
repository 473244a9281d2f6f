"""A draft that learns while it serves (Liu et al. 2023, arXiv 2310.07177), in the spare time of its engine.

    committed tokens ─▶ Lesson ─▶ Windows ─▶ Student.study ─▶ Grades ─▶ replace the served weights, or go back
      (event loop)               └──────────── engine thread, between steps ────────────────────────────────┘

Between steps, no draft token has been drawn whose distribution is still to be computed: what is sent is what
was drawn from, whatever the weights are afterwards.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_service.lessons import Grades, Lesson, Window, Windows
from specwire import clock
from specwire.config.services import DraftConfig
from specwire.core import Learning
from specwire.engine import boot
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.engine.loop import Engine
from specwire.errors import ConfigError, ModelLoadError
from specwire.rule.columns import EDITED
from specwire.telemetry.metrics import Counter, Gauge, Metric

if TYPE_CHECKING:
    from draft_service.student import Student

log = logging.getLogger(__name__)

CAPACITY = 256
"""Windows that wait to be studied; with those that wait to be studied again, 2 MiB at most."""
NUM_REPEATS = 3
_SHAPE = "model_type", "vocab_size", "hidden_size", "num_hidden_layers"
"""What the config of another model has otherwise."""
_MEMORY = 0.9
"""Of the average time of a piece."""


TABLE: tuple[Metric[Learning], ...] = (
    Counter(
        "specwire_learn_steps_total",
        "Steps of a draft that learns while it serves (--learn).",
        lambda now: now.num_steps,
    ),
    Counter(
        "specwire_learn_judged_tokens_total",
        "Tokens of the target that the draft was tested on before it learnt from them.",
        lambda now: now.num_judged_tokens,
    ),
    Counter(
        "specwire_learn_decisions_total",
        "How often what was learnt replaced the served weights, or was given up as worse.",
        lambda now: {("replace",): now.num_versions, ("go back",): now.num_rollbacks},
        ("decision",),
    ),
    Gauge(
        "specwire_learn_agreement",
        "Probability that the draft's token is the target's: first, and with the weights that serve now.",
        lambda now: {("first",): now.first_agreement, ("now",): now.agreement},
        ("weights",),
    ),
)
"""All are 0 for a draft that does not learn."""


class Learner:
    """`engine.device.SpareWork`.

    Args:
        share: of the engine thread's time.
        is_shared: learn from sequences that share no cached prefix with others, too.

    Attributes:
        learning: what it has come to; any thread may read it.
    """

    def __init__(self, engine: Engine, student: Student, *, share: float, is_shared: bool) -> None:
        self.version = 0
        self.usual_s = 0.0
        self.learning = Learning()
        self._engine = engine
        self.student = student
        self._pause_ratio = 1 / share - 1
        self._is_shared = is_shared
        self._windows = Windows(CAPACITY, NUM_REPEATS)
        self._grades = Grades()
        self._due_ns = 0
        self._num_steps = self._num_rollbacks = 0

    # --- on the event loop ----------------------------------------------------------------------------

    def lesson(self, sequence: TokenSequence) -> Lesson | None:
        """What collects the tokens of a new sequence; None if nothing is to be learnt from it.

        With biases and penalties the target's tokens follow another distribution than its own. A salt keeps
        what a request says from others, who would see some of it in draft tokens.
        """
        params = sequence.params
        is_private = params.cache_salt != "" and not self._is_shared
        if is_private or sequence.encoded.traits & EDITED:
            return None
        return Lesson(sequence.prompt_len, 0.0 if params.greedy else params.temperature, self._hand_over)

    def _hand_over(self, window: Window) -> None:
        self._engine.run_soon(lambda: self._windows.add(window))

    # --- on the engine's thread -----------------------------------------------------------------------

    def wait_s(self) -> float | None:
        if not self._windows:
            return None
        return max(0, self._due_ns - clock.stopwatch_ns()) / 1e9

    def do(self) -> None:
        """Study one window. A failure ends the learning, not the service."""
        started_ns = clock.stopwatch_ns()
        try:
            self._study()
        except Exception:
            log.exception("the draft learns no more")
            self._windows = Windows(0, 0)
        finished_ns = clock.stopwatch_ns()
        spent_ns = finished_ns - started_ns
        self._due_ns = finished_ns + int(self._pause_ratio * spent_ns)
        self.usual_s = max(spent_ns / 1e9, _MEMORY * self.usual_s)
        self.learning = Learning(
            num_steps=self._num_steps,
            num_judged_tokens=self._grades.num_labels,
            first_agreement=self._grades.first_agreement,
            agreement=self._grades.agreement,
            num_versions=self.version,
            num_rollbacks=self._num_rollbacks,
        )

    def _study(self) -> None:
        window, is_fresh = self._windows.take()
        grade = self.student.study(window, is_graded=is_fresh)
        if self.student.is_step_due:
            if self.student.step():
                self._num_steps += 1
            else:
                self._go_back()
        if grade is not None:
            self._grades.add(grade)
            is_better = self._grades.decide()
            if is_better:
                self.student.publish()
                self.version += 1
                log.info("version %d of the draft's weights", self.version)
            elif is_better is not None:
                self._go_back()

    def _go_back(self) -> None:
        self.student.go_back()
        self._num_rollbacks += 1
        log.info("the draft learns on from version %d of its weights", self.version)


def start(config: DraftConfig, service: ModelService) -> Learner | None:
    """Let the service learn, if it is to.

    Raises:
        ConfigError: they cannot be written where they are to be in the end, or would replace another model.
        ModelLoadError: its weights cannot be changed.
    """
    if not config.learn:
        return None
    if config.learn_out:  # what is learnt would be lost at the end
        out = Path(config.learn_out)
        there = next(place for place in (out, *out.absolute().parents) if place.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise ConfigError(f"--learn-out {out}: cannot be written")
    from draft_service.student import Student  # transformers takes seconds to import

    if config.learn_out:
        _check_out(Path(config.learn_out), service.runner.model.config.to_dict())  # type: ignore[attr-defined]
    try:
        student = Student(service.runner.model, config.learn_rate)  # type: ignore[attr-defined]
    except ModelLoadError as error:
        raise ModelLoadError(f"--model {config.model}: {error}") from error
    learner = Learner(service.engine, student, share=config.learn_share, is_shared=config.learn_shared)
    service.engine.add_spare_work(learner)
    return learner


def _check_out(out: Path, ours: Mapping[str, Any]) -> None:
    """Weights of this model may be there, from a run before; those of another one are not replaced."""
    try:
        theirs = json.loads((out / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if not isinstance(theirs, dict):
        return
    for name in _SHAPE:
        if theirs.get(name, ours.get(name)) != ours.get(name):
            problem = f"has another model, of {name} {theirs.get(name)!r} and not {ours.get(name)!r}"
            raise ConfigError(f"--learn-out {out}: {problem}")


def close(config: DraftConfig, service: ModelService, learner: Learner | None) -> None:
    """End the service; what was learnt is written where the config says."""
    service.close()
    if learner is not None and config.learn_out and learner.version:
        from safetensors import SafetensorError  # as torch: not before a model is loaded

        source = boot.model_directory(boot.resolve(config.model, "draft"))
        directory = Path(config.learn_out)
        try:
            learner.student.save(directory, source)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--learn-out {directory}: cannot be written ({error})") from None
        log.info("version %d of the draft's weights is in %s", learner.version, directory)
