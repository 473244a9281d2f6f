"""Layers that a target leaves out when it drafts: files that name them, and the search for such layers.

What they have in common with other drafts of the target's process: `test_own_drafts`.
"""

from __future__ import annotations

import contextlib
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from specwire.config.blocks import Block, parse_skip
from specwire.engine.layers import files
from specwire.engine.layers.blocks import ModelBlocks
from specwire.engine.layers.files import Found
from specwire.engine.model.fingerprint import weights_fingerprint
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ConfigError, ModelLoadError
from tests.support.harness import local_stack
from tests.support.pairs import save_target
from tests.support.tiny_models import build
from tools.layers import command as search_layers
from tools.layers import search
from tools.layers.config import SearchLayersConfig
from tools.layers.objective import Costs, Promise, Trials, num_pages, promise


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


# --- refusals -----------------------------------------------------------------------------------------


def start(target: Path, layers: Path | str) -> None:
    with local_stack(target, verify_options={"layers": str(layers)}):
        pass


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
        start(own, "auto")
    files.save(own / files.BESIDE, found(own))
    start(own, "auto")
    start(own, own / files.BESIDE)
    with pytest.raises(ModelLoadError, match=r"blocks of 'own' \(\w+\), not of 'target\d*' \(\w+\)"):
        start(target, own / files.BESIDE)
    with pytest.raises(ModelLoadError, match="names no blocks"):
        start(own, own / "config.json")


def test_blocks_that_the_target_does_not_have(target: Path, tmp_path: Path) -> None:
    problem = "--layers a0,a2: the model has no blocks a2: its layers are 0 to 1"
    with pytest.raises(ModelLoadError, match=problem):
        start(target, "a0,a2")
    with pytest.raises(ModelLoadError, match="OPTDecoderLayer is not made of one attention and one MLP"):
        start(save_target(tmp_path / "opt", "opt"), "a0")


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
    runner.pool.check_integrity()
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
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a text to a file that `layers:auto` reads, and a picture."""
    pytest.importorskip("bayes_opt")
    target, text = "embedded", tmp_path / "text"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(60)))
    out, picture = tmp_path / "found.json", tmp_path / "search.png"
    config = SearchLayersConfig(
        target=target, text=str(text), out=str(out), picture=str(picture), trials=4, prompts=1, num_threads=1
    )
    assert search_layers.run(config) == 0
    assert "4 sets tried" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert files.read(out).num_tried == 4


def test_texts_that_are_no_good(tmp_path: Path) -> None:
    pytest.importorskip("bayes_opt")
    text = tmp_path / "text"
    text.write_text("few")
    with pytest.raises(ConfigError, match="too short"):
        search.run(SearchLayersConfig(text=str(text)), _quiet)
    with pytest.raises(ConfigError, match="--text"):
        SearchLayersConfig()


def _quiet(title: str, total: int) -> Any:
    return contextlib.nullcontext(lambda num: None)
