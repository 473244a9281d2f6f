"""Heads of a target: directories that are refused by name, and training.

What they have in common with other drafts of the target's process: `test_own_drafts`.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specwire import Rule, SamplingParams
from specwire.engine.heads import files
from specwire.errors import ConfigError, ModelLoadError
from tests.support.harness import local_stack
from tests.support.heads import save_heads
from tests.support.pairs import save_target
from tools.heads import descent, training
from tools.heads.config import TrainHeadsConfig

HEADS = '{"method": "medusa"}'
GREEDY = SamplingParams(max_tokens=32, temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heads(tmp_path_factory.mktemp("heads") / "heads", target)


# --- refusals -----------------------------------------------------------------------------------------


def start(target: Path, heads: Path | str) -> None:
    with local_stack(target, verify_options={"heads": str(heads)}):
        pass


def test_heads_of_another_target(heads: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=1)
    with pytest.raises(
        ModelLoadError, match=r"--heads .*: heads of 'target\d*' \(\w+\), not of 'other' \(\w+\)"
    ):
        start(other, heads)
    wider = save_target(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ModelLoadError, match="heads for states of 32, and 'wider' has 64"):
        start(wider, heads)


def test_directories_without_heads(target: Path, heads: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--heads .*: no heads there: No such file"):
        start(target, tmp_path / "nothing")
    with pytest.raises(ModelLoadError, match="describes no heads"):
        start(target, target)
    broken = Path(shutil.copytree(heads, tmp_path / "broken"))
    (broken / files.WEIGHTS).write_bytes(b"other")
    with pytest.raises(ModelLoadError, match="is not the file that config"):
        start(target, broken)


# --- training -----------------------------------------------------------------------------------------

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(400))


class InterruptionError(Exception):
    """Ends a training."""


class Bar:
    """Counts what is done; ends the training within the part of this title, after so much of it."""

    def __init__(self, title: str = "", after: int = 0) -> None:
        self.done: dict[str, int] = {}
        self._title, self._after = title, after

    def __call__(self, title: str, total: int) -> Any:
        return self._of(title)

    def _of(self, title: str) -> Any:
        def advance(num: int) -> None:
            self.done[title] = self.done.get(title, 0) + num
            if title == self._title and self.done[title] > self._after:
                raise InterruptionError

        return contextlib.nullcontext(advance)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text(TEXT)
    return path


def test_an_interrupted_training_goes_on(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same heads as of one that was not interrupted, bit for bit, and nothing is done twice."""
    monkeypatch.setattr(descent, "_SAVE_STEPS", 2)
    settings = {"text": str(text), "tokens": 2048, "num_features": 32, "num_heads": 2, "steps": 4}
    whole = TrainHeadsConfig(**settings, out=str(tmp_path / "whole"), num_threads=1)  # type: ignore[arg-type]
    made = training.train(whole, Bar())
    parts = TrainHeadsConfig(**settings, out=str(tmp_path / "parts"), num_threads=1)  # type: ignore[arg-type]
    for title, after in (("states", 600), ("closed form", 3000), ("steps", 2)):
        with pytest.raises(InterruptionError):
            training.train(parts, Bar(title, after))
        with pytest.raises(ModelLoadError, match="no heads there"):
            files.read_config(tmp_path / "parts")
    assert training.train(parts, Bar()) == made
    ours, theirs = (files.read_config(tmp_path / name) for name in ("whole", "parts"))
    assert ours == theirs
    assert [path.name for path in sorted((tmp_path / "parts").iterdir())] == [files.CONFIG, files.WEIGHTS]


def test_heads_of_a_text_propose_it(text: Path, tmp_path: Path) -> None:
    """Trained on a text that the embedded target finds easy, and with gradient steps, they draft it."""
    out = tmp_path / "heads"
    config = TrainHeadsConfig(text=str(text), out=str(out), tokens=4096, num_features=64, num_threads=1)
    training.train(config, Bar())
    with local_stack(
        "embedded", coordinator_options={"speculative_config": HEADS}, verify_options={"heads": str(out)}
    ) as stack:
        params = replace(GREEDY, max_tokens=64, num_draft_tokens=16, max_depth=4)
        done = stack.client.generate(TEXT[-300:], params)
        plain = stack.client.generate(TEXT[-300:], replace(params, num_draft_tokens=0, max_depth=0))
    assert done.token_ids == plain.token_ids
    assert len(done.token_ids) / done.speculation.num_rounds > 1.5


def test_texts_that_are_no_good(text: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    text.write_text("few")
    with pytest.raises(ConfigError, match="too few"):
        training.train(TrainHeadsConfig(text=str(text), out=out), Bar())
    text.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="--text"):
        training.train(TrainHeadsConfig(text=str(text), out=out), Bar())
    with pytest.raises(ConfigError, match="--text"):
        TrainHeadsConfig(out=out)
