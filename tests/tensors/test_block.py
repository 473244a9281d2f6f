"""Block drafters on the paged engine: limits and refusals; `test_paged_drafters` has what they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specwire.engine.batch import Feed
from specwire.engine.model import block
from specwire.engine.model.block import BlockRunner
from specwire.engine.model.loading import load_model
from specwire.errors import ContextLengthError, ModelLoadError
from tests.support.blocks import BLOCK_SIZE, save_block_drafter
from tests.support.pairs import save_target
from tests.support.tiny_models import CONTEXT_LEN


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_block_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def runner(target: Path, drafter: Path) -> BlockRunner:
    model = load_model(target, dtype="float32")
    return BlockRunner(model, block.load(drafter, model), num_pages=160, page_size=4)


def test_the_end_of_the_context(runner: BlockRunner) -> None:
    with runner.new_sequence() as cache:
        runner.forward([Feed(cache, [1] * (CONTEXT_LEN - BLOCK_SIZE + 1))])
        with pytest.raises(ContextLengthError):
            runner.draft([cache], [1])
        assert cache.length == CONTEXT_LEN - BLOCK_SIZE + 1


def test_drafters_of_other_targets(target: Path, tmp_path: Path) -> None:
    model = load_model(target, dtype="float32")
    for name, overrides, problem in (
        ("size", {"hidden_size": 16}, "is for states of 16, and the target has 32"),
        ("layer", {"target_layer_ids": [0, 7]}, "reads layer 7, and the target has 2"),
        ("mask", {"mask_token_id": 500}, "its mask is token 500, which the target cannot read"),
    ):
        with pytest.raises(ModelLoadError, match=problem):
            block.load(save_block_drafter(tmp_path / name, **overrides), model)
    with pytest.raises(ModelLoadError, match="'llama' is no block drafter"):
        block.load(target, model)


def test_control_states_of_another_layer_are_refused(
    target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at loading notices that the drafter reads layers in the wrong order."""
    own = BlockRunner._note

    def swapped(self: BlockRunner, number: int, *args: Any) -> None:
        own(self, 1 - number, *args)

    monkeypatch.setattr(BlockRunner, "_note", swapped)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        block.load(drafter, load_model(target, dtype="float32"))
