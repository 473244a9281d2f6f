"""Heads of a target, and layers that it leaves out: what is refused by name, training, the search.

What they have in common with other drafts of the target's process: `test_own_drafts`.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from specwire import Rule, SamplingParams
from specwire.config.blocks import Block, parse_skip
from specwire.engine.heads import files
from specwire.engine.layers import files as layer_files
from specwire.engine.layers.blocks import ModelBlocks
from specwire.engine.layers.files import Found
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ConfigError, ModelLoadError
from tests.support.harness import local_stack
from tests.support.heads import save_heads
from tests.support.integrity import check_integrity
from tests.support.pairs import save_target
from tests.support.tiny_models import build
from tools import training as shared_training
from tools.drafts import SearchLayersConfig, TrainEagle3Config, TrainHeadsConfig, search_layers
from tools.eagle3 import training as eagle3_training
from tools.heads import training
from tools.layers import search
from tools.layers.objective import Costs, Promise, Trials, num_pages, promise

GREEDY = SamplingParams(max_tokens=32, temperature=0, rule=Rule.GUMBEL, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heads(tmp_path_factory.mktemp("heads") / "heads", target)


# --- refusals -----------------------------------------------------------------------------------------


def start(target: Path, **options: Path | str) -> None:
    """A target that is to draft by itself."""
    with local_stack(target, verify_options={name: str(value) for name, value in options.items()}):
        pass


def test_heads_of_another_target(heads: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=1)
    with pytest.raises(
        ModelLoadError, match=r"--heads .*: heads of 'target\d*' \(\w+\), not of 'other' \(\w+\)"
    ):
        start(other, heads=heads)
    wider = save_target(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ModelLoadError, match="heads for states of 32, and 'wider' has 64"):
        start(wider, heads=heads)


def test_directories_without_heads(target: Path, heads: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--heads .*: no heads there: No such file"):
        start(target, heads=tmp_path / "nothing")
    with pytest.raises(ModelLoadError, match="describes no heads"):
        start(target, heads=target)
    broken = Path(shutil.copytree(heads, tmp_path / "broken"))
    (broken / files.WEIGHTS).write_bytes(b"other")
    with pytest.raises(ModelLoadError, match="is not the file that config"):
        start(target, heads=broken)


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
    monkeypatch.setattr(shared_training, "_SAVE_STEPS", 2)
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


@pytest.mark.slow  # the training above runs the same steps
def test_heads_of_a_text_propose_it(text: Path, tmp_path: Path) -> None:
    """Trained on a text that the embedded target finds easy, and with gradient steps, they draft it."""
    out = tmp_path / "heads"
    config = TrainHeadsConfig(text=str(text), out=str(out), tokens=2048, num_features=32, num_threads=1)
    training.train(config, Bar())
    assert tokens_a_pass("medusa", heads=str(out)) > 1.5


def tokens_a_pass(method: str, **drafts: str) -> float:
    """Of the embedded target on the trained text, which is that of plain decoding."""
    options = {"speculative_config": f'{{"method": "{method}"}}'}
    with local_stack("embedded", coordinator_options=options, verify_options=drafts) as stack:
        params = replace(GREEDY, max_tokens=64, num_draft_tokens=16, max_depth=4)
        done = stack.client.generate(TEXT[-300:], params)
        plain = stack.client.generate(TEXT[-300:], replace(params, num_draft_tokens=0, max_depth=0))
    assert done.token_ids == plain.token_ids
    return len(done.token_ids) / done.speculation.num_rounds


@pytest.mark.slow
def test_an_eagle3_of_a_text_proposes_it(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the target's tokens; an interrupted training ends with the same files, bit for bit."""
    monkeypatch.setattr(shared_training, "_SAVE_STEPS", 12)
    whole, parts = (
        TrainEagle3Config(
            text=str(text), out=str(tmp_path / name), steps=40, draft_vocab_size=1024, num_threads=1
        )
        for name in ("whole", "parts")
    )
    eagle3_training.train(whole, Bar())
    with pytest.raises(InterruptionError):
        eagle3_training.train(parts, Bar("steps", 15))
    eagle3_training.train(parts, Bar())
    ours, theirs = (
        {path.name: path.read_bytes() for path in Path(each.out).iterdir()} for each in (whole, parts)
    )
    assert ours == theirs
    assert sorted(ours) == ["config.json", "model.safetensors"]
    assert tokens_a_pass("eagle3", eagle3=whole.out) > 1.2


def test_places_that_cannot_be_written(text: Path, tmp_path: Path) -> None:
    """Are refused by their flag, before the work."""
    out = str(text / "heads")  # below a file
    for config in (TrainHeadsConfig, TrainEagle3Config):
        with pytest.raises(ConfigError, match=f"--out {out}: cannot be written"):
            shared_training.prepared(config(text=str(text), out=out), 1)
    pytest.importorskip("bayes_opt")
    with pytest.raises(ConfigError, match=f"--out {text}: cannot be written"):
        search.run(SearchLayersConfig(text=str(text), prompts=1, out=f"{text}/layers.json"), Bar())
    with pytest.raises(ConfigError, match=r"--picture /nope/x\.png: cannot be written"):
        search_layers(SearchLayersConfig(text=str(text), picture="/nope/x.png"))


def test_texts_that_are_no_good(text: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    text.write_text("few")
    with pytest.raises(ConfigError, match="too few"):
        training.train(TrainHeadsConfig(text=str(text), out=out), Bar())
    text.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="--text"):
        training.train(TrainHeadsConfig(text=str(text), out=out), Bar())
    for make in (partial(TrainHeadsConfig, out=out), SearchLayersConfig):
        with pytest.raises(ConfigError, match="--text"):
            make()


# --- layers that a target leaves out when it drafts -------------------------------------------------


def found(target: Path, skip: str = "a0,m1") -> Found:
    return Found(
        target=target.name,
        target_fingerprint=weights_fingerprint(target),
        skip=skip,
        num_draft_tokens=4,
        tokens_a_pass=2.0,
        cost=0.5,
        speedup=1.0,
        num_tried=1,
    )


def test_a_file_names_its_target(target: Path, tmp_path: Path) -> None:
    """`auto` reads the one beside the model; another target's is refused, and so is what is none."""
    own = save_target(tmp_path / "own", seed=2)
    with pytest.raises(ModelLoadError, match=r"--layers auto: .*layers.json: No such file"):
        start(own, layers="auto")
    layer_files.save(own / layer_files.BESIDE, found(own))
    start(own, layers="auto")
    start(own, layers=own / layer_files.BESIDE)
    with pytest.raises(ModelLoadError, match=r"blocks of 'own' \(\w+\), not of 'target\d*' \(\w+\)"):
        start(target, layers=own / layer_files.BESIDE)
    with pytest.raises(ModelLoadError, match="names no blocks"):
        start(own, layers=own / "config.json")


def test_blocks_that_the_target_does_not_have(target: Path, tmp_path: Path) -> None:
    problem = "--layers a0,a2: the model has no blocks a2: its layers are 0 to 1"
    with pytest.raises(ModelLoadError, match=problem):
        start(target, layers="a0,a2")
    with pytest.raises(ModelLoadError, match="OPTDecoderLayer is not made of one attention and one MLP"):
        start(save_target(tmp_path / "opt", "opt"), layers="a0")


# --- the search ---------------------------------------------------------------------------------------


def test_the_closed_form() -> None:
    """By hand: three tokens for a pass of two tokens, and two draft passes of half a pass each."""
    costs = Costs([10.0, 11.0, 12.0], attention=2.0, mlp=3.0)
    skipped = parse_skip("layers", "a0,m0")
    made = promise(skipped, [1.0, 1.0], costs)
    assert made == Promise(skipped, 2, 3.0, 0.5, 30 / 22)
    assert promise(skipped, [0.5, 0.0], costs).num_draft_tokens == 1


def test_drafts_are_judged_against_the_targets_own_text() -> None:
    """With nothing left out every draft token is right, with everything few are. The cache is free then."""
    prompts = [[5, 9, 11, 2], [7, 4, 8, 1, 3]]
    model = build("llama")
    runner = ModelRunner(model, num_pages=num_pages(2, 5, 4, 4), page_size=4)
    blocks = ModelBlocks(model)
    trials = Trials(runner, prompts, 4)
    assert trials.reached(blocks.without(())) == [1.0] * 4
    reached = trials.reached(blocks.without(blocks.all()))
    assert reached == sorted(reached, reverse=True)
    assert reached[0] < 0.5
    trials.close()
    check_integrity(runner.pool)
    assert runner.pool.num_held_pages == 0


class Landscape:
    """Predicted speed-ups of sets of blocks: each saves as much, some hurt much, and two are worth more
    together."""

    def __init__(self, seed: int, num_layers: int = 6) -> None:
        rng = random.Random(seed)
        self.blocks = tuple(Block(layer, kind) for layer in range(num_layers) for kind in "am")
        self._saves = 1 / len(self.blocks)
        self._harm = {block: 12 * self._saves * rng.choice([0.01, 0.02, 0.05, 0.3]) for block in self.blocks}
        self._pair = set(rng.sample(self.blocks, 2))
        self.num_asked = 0

    def __call__(self, skipped: tuple[Block, ...]) -> Promise:
        self.num_asked += 1
        return self.of(skipped)

    def of(self, skipped: tuple[Block, ...]) -> Promise:
        alpha = max(0.0, 1 - sum(self._harm[block] for block in skipped)) + 0.05 * (self._pair <= {*skipped})
        reached = [min(1.0, alpha) ** depth for depth in range(1, 9)]
        return promise(skipped, reached, Costs([1.0] * 9, self._saves, self._saves))


def test_the_search_finds_what_a_grid_finds() -> None:
    """After 60 of 4,095 sets, one within 2 % of the best of them; none is tried twice."""
    pytest.importorskip("bayes_opt")
    landscape = Landscape(0)
    grid = [
        landscape.of(skipped) for size in range(1, 13) for skipped in combinations(landscape.blocks, size)
    ]
    best = max(each.speedup for each in grid)
    tried = search.search(landscape.blocks, landscape, 60)
    assert len(tried) == landscape.num_asked == len({each.blocks for each in tried}) == 60
    assert max(each.speedup for each in tried) > 0.98 * best


@pytest.mark.slow
def test_the_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a text to a file that `layers:auto` reads, and a picture."""
    pytest.importorskip("bayes_opt")
    out, picture = tmp_path / "found.json", tmp_path / "search.png"
    given: dict[str, Any] = {
        "target": "embedded",
        "text": str(text),
        "out": str(out),
        "picture": str(picture),
    }
    search_layers(SearchLayersConfig(**given, trials=4, prompts=1, num_threads=1))
    assert "4 sets tried" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert layer_files.read(out).num_tried == 4


def test_texts_that_are_too_short(text: Path) -> None:
    pytest.importorskip("bayes_opt")
    text.write_text("few")
    with pytest.raises(ConfigError, match="too short"):
        search.run(SearchLayersConfig(text=str(text)), Bar())
