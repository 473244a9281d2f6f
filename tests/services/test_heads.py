"""Heads of a target through real services: refusals by name, losses, training, `specwire drafts`."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specwire import InvalidRequestError, Rule, SamplingParams
from specwire.cli import drafts
from specwire.config.client import ClientConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig
from specwire.engine.heads import files
from specwire.errors import ConfigError, ModelLoadError
from tests.support.harness import LocalStack, local_stack
from tests.support.heads import save_heads
from tests.support.pairs import save_target
from tools.heads import descent, training
from tools.heads.config import TrainHeadsConfig
from tools.proxy.delay_proxy import Link

HEADS = '{"method": "medusa"}'
PROMPT = [5, 9, 11, 2, 7, 4]
GREEDY = SamplingParams(max_tokens=32, temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heads(tmp_path_factory.mktemp("heads") / "heads", target)


@pytest.fixture(scope="module")
def stack(target: Path, heads: Path) -> Iterator[LocalStack]:
    """With a link between coordinator and verify; heads are not the default."""
    with local_stack(target, verify_options={"heads": str(heads)}, verify_link=Link()) as running:
        yield running


def test_a_request_may_ask_for_them(stack: LocalStack) -> None:
    plain = stack.client.generate(params=GREEDY, prompt_token_ids=PROMPT)
    assert not plain.speculation.by_source
    for name in ("heads", "medusa"):
        done = stack.client.generate(params=replace(GREEDY, draft=name), prompt_token_ids=PROMPT)
        assert done.token_ids == plain.token_ids
        [counts] = done.speculation.by_source
        assert counts.source == "heads"
    with pytest.raises(InvalidRequestError, match="draft=ngram,heads: is not offered here"):
        stack.client.generate(params=replace(GREEDY, draft="ngram,heads"), prompt_token_ids=PROMPT)


def test_a_request_that_leaves_the_rule_open_is_coupled(stack: LocalStack) -> None:
    """Under rejection sampling the target could not share noise with its heads, and would have no trees."""
    params = SamplingParams(max_tokens=4, draft="heads")
    assert stack.client.generate(params=params, prompt_token_ids=PROMPT).rule is Rule.GUMBEL


@pytest.mark.sample(1)
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_lost_target_changes_no_text(stack: LocalStack, temperature: float) -> None:
    """The connection is cut again and again while the text is read; each time a new sequence is opened."""
    params = replace(GREEDY, temperature=temperature, max_tokens=120, num_draft_tokens=3)
    plain = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert stack.verify_proxy is not None
    with stack.client.stream(None, replace(params, draft="heads"), prompt_token_ids=PROMPT) as running:
        for number, _ in enumerate(running):
            if number in (5, 15):
                stack.verify_proxy.cut()
        assert running.completion.token_ids == plain.token_ids
    stack.assert_idle_within(5.0)


def test_a_client_that_stops_reading(stack: LocalStack) -> None:
    """Nothing is held for it any more, though its rounds were begun by the target."""
    params = replace(GREEDY, max_tokens=400, draft="heads", num_draft_tokens=3)
    with stack.client.stream(None, params, prompt_token_ids=PROMPT) as running:
        next(iter(running))
    stack.assert_idle_within(5.0)


def test_the_command_drafts(stack: LocalStack) -> None:
    stack.client.generate(params=replace(GREEDY, draft="heads", num_draft_tokens=2), prompt_token_ids=PROMPT)
    shown = drafts.show(ClientConfig(server=stack.address), colour=False).splitlines()
    rows = {line.split()[0]: line for line in shown if line}
    assert list(rows) == [
        "draft",
        "model",
        "kseq",
        "INNER>model",
        "num_beams",
        "heads",
        "layers",
        "mtp",
        "dflash",
        "ngram",
        "suffix",
        "unigram",
        "bigram",
        "trigram",
    ]
    assert rows["model"].split()[1] == "no"
    assert rows["heads"].split()[1] == "yes"
    by_source = stack.client.get_status().by_source
    [num_rounds] = [each.num_drafts for each in by_source if each.source == "heads"]
    assert f" {num_rounds} " in rows["heads"]


# --- refusals -----------------------------------------------------------------------------------------


def start(target: Path, heads: Path | str, **coordinator: Any) -> None:
    with local_stack(target, coordinator_options=coordinator, verify_options={"heads": str(heads)}):
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


def test_a_target_without_heads(target: Path) -> None:
    with (
        pytest.raises(ConfigError, match="the verify service has no heads"),
        local_stack(target, coordinator_options={"speculative_config": HEADS}),
    ):
        pass
    with (
        local_stack(target) as running,
        pytest.raises(InvalidRequestError, match="draft=heads: is not offered here"),
    ):
        running.client.generate(params=replace(GREEDY, draft="heads"), prompt_token_ids=PROMPT)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: VerifyConfig(model="emulated:step_ms=1", heads="x"), "has no hidden states"),
        (lambda: VerifyConfig(heads="x", tensor_parallel_size=2), "--tensor-parallel-size 1 only"),
        (lambda: DraftConfig(model="heads:x"), "see the verify service's flag --heads"),
        (lambda: CoordinatorConfig(speculative_config='{"method": "medusa", "model": "x"}'), "--heads"),
        (lambda: UpConfig(draft="heads"), "needs more: heads:DIR"),
        (lambda: UpConfig(draft="heads:"), "no directory of heads"),
        (lambda: UpConfig(draft="heads:/nowhere"), "no directory of heads"),
        (lambda: UpConfig(speculative_config=HEADS), "no directory of heads"),
        (lambda: UpConfig(draft="heads:/tmp", speculative_config='{"method": "ngram"}'), "another method"),
        (lambda: UpConfig(draft="/tmp", speculative_config=HEADS), "second draft"),
        (lambda: UpConfig(draft="heads:/tmp", target="emulated:step_ms=1"), "has no hidden states"),
        (
            lambda: UpConfig(speculative_config='{"method": "medusa", "corpus": "x"}'),
            "is not a key of method",
        ),
    ],
)
def test_what_does_not_combine(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


def test_what_is_passed_on(tmp_path: Path) -> None:
    """The directory to verify, the rest to the coordinator; there is no draft service."""
    given = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 16, "max_depth": 4}
    for config in (
        UpConfig(speculative_config=json.dumps(given)),
        UpConfig(draft="none", speculative_config=json.dumps(given)),
    ):
        assert (config.draft_model, config.own) == ("none", ("heads", str(tmp_path)))
        coordinator = CoordinatorConfig(speculative_config=config.coordinator_speculation)
        assert coordinator.own_source == "heads"
        assert (coordinator.fixed_draft_tokens, coordinator.fixed_max_depth) == (16, 4)
    named = UpConfig(draft=f"heads:{tmp_path}")
    assert (named.draft_model, named.own) == ("none", ("heads", str(tmp_path)))
    assert CoordinatorConfig(speculative_config=named.coordinator_speculation).own_source == "heads"


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
