"""Layers for multi-token prediction on the paged engine: trees, limits and refusals.

`test_paged_drafters` has what they draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specwire.engine.batch import Batch, Feed, Segments
from specwire.engine.model import mtp
from specwire.engine.model.loading import load_model
from specwire.engine.model.mtp import MtpRunner
from specwire.errors import ModelLoadError, ResourceExhaustedError
from specwire.proposals.tree import TokenTree
from tests.support.mtp import drafted, save_mtp_target
from tests.support.tiny_models import MTP_FAMILIES, build, save

PROMPT = [5, 9, 11, 2, 7, 4, 30, 21]


@pytest.fixture(scope="module", params=MTP_FAMILIES)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp_target(tmp_path_factory.mktemp("mtp") / request.param, request.param, spread=0.6)


@pytest.fixture(scope="module")
def runner(directory: Path) -> MtpRunner:
    model = load_model(directory, dtype="float32")
    return MtpRunner(model, mtp.load(model), num_pages=64, page_size=4)


def test_after_a_path_of_a_tree(runner: MtpRunner) -> None:
    """Nodes are computed after their parents, and the path that is kept moves together."""
    path, parents = [17, 23, 5], [-1, -1, 1, 2, 0]
    nodes = [40, 17, 23, 5, 41]
    with runner.new_sequence() as plain, runner.new_sequence() as kept:
        runner.forward([Feed(plain, [*PROMPT, *path])])
        tree = TokenTree(len(PROMPT), tuple(parents))
        runner.forward([Feed(kept, [*PROMPT, *nodes], 1, tree)])
        kept.keep(len(PROMPT), [1, 2, 3])
        assert drafted(runner, kept, 3, 3) == drafted(runner, plain, 3, 3)


def test_a_full_cache(runner: MtpRunner) -> None:
    """Nothing is appended then."""
    with runner.new_sequence() as cache, runner.new_sequence() as other:
        runner.forward([Feed(cache, PROMPT)])
        other.reserve(runner.pool.num_free_pages * runner.pool.page_size)
        with pytest.raises(ResourceExhaustedError):
            runner.advance([Feed(cache, [1])], 0, None)
        assert cache.length == len(PROMPT)


def test_first_tokens_are_left_out() -> None:
    """Of each sequence those that a layer has no state for; one with no others is not in the row."""
    segments = Segments([0, 3, 4, 6], [3, 1, 9], [[0], [1], [2, 3]], 8, {}, ())  # type: ignore[list-item]
    numbers = np.arange(6)
    row = Batch(numbers, numbers, np.array([0, 1, 2, 8, 23, 24]), segments, numbers)
    kept, left = mtp.without_first(row, 1)
    assert kept.tolist() == [False, True, True, False, True, True]
    assert [*left.query_offsets] == [0, 2, 4]
    assert [*left.encoder_lens] == [1, 1]
    assert mtp.previous_slots(row)[kept].tolist() == [0, 1, 22, 23]


def test_a_model_without_them(tmp_path: Path) -> None:
    model = load_model(save(build("llama"), tmp_path / "llama"))
    with pytest.raises(ModelLoadError, match="'llama' has no layers for multi-token prediction"):
        mtp.load(model)


def test_a_checkpoint_without_their_weights(tmp_path: Path) -> None:
    model = load_model(save(build("mellum"), tmp_path / "mellum"))
    with pytest.raises(ModelLoadError, match="weights are missing"):
        mtp.load(model)


def test_control_states_of_other_tokens_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at loading notices layers that read the state of the token itself."""
    monkeypatch.setattr(mtp, "previous_slots", lambda batch: batch.slots)
    with pytest.raises(ModelLoadError, match="self-check failed"):
        mtp.load(load_model(directory, dtype="float32"))
