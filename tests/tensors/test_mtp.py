"""Layers for multi-token prediction on the paged engine: what they draft, wherever their keys come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import candidate_generator

from specwire.engine.batch import Batch, Feed, Segments
from specwire.engine.model import mtp
from specwire.engine.model.loading import load_model
from specwire.engine.model.mtp import MtpRunner
from specwire.errors import ModelLoadError, ResourceExhaustedError
from specwire.tree import TokenTree
from tests.support.mtp import save_mtp_target
from tests.support.tiny_models import MTP_FAMILIES, build, save

PROMPT = [5, 9, 11, 2, 7, 4, 30, 21]


@pytest.fixture(scope="module", params=MTP_FAMILIES)
def directory(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp_target(tmp_path_factory.mktemp("mtp") / request.param, request.param, spread=0.6)


@pytest.fixture(scope="module")
def runner(directory: Path) -> MtpRunner:
    model = load_model(directory, dtype="float32")
    return MtpRunner(model, mtp.load(model), num_pages=64, page_size=4)


def drafted(runner: MtpRunner, cache: Any, token_id: int, num: int) -> list[int]:
    """Greedy drafts after a token that follows the cache, which keeps its length."""
    length, states, found = cache.length, None, [token_id]
    for depth in range(num):
        states = runner.advance([Feed(cache, [found[-1]])], depth, states)
        found.append(int(runner.logits(states)[0].argmax()))
    cache.truncate(length)
    return found[1:]


def test_they_draft_what_transformers_does(
    directory: Path, runner: MtpRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All proposals of a whole `generate(use_mtp=True)`, with its own cache and its own rollbacks."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    mtp._name_layers(model, model.config.num_hidden_layers, model.config.num_mtp_layers)
    asked: list[tuple[list[int], list[int]]] = []
    propose = candidate_generator.MTPCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        found = propose(self, input_ids, *args, **keywords)
        before = input_ids[0].tolist()
        asked.append((before, found[0][0, len(before) :].tolist()))
        return found

    monkeypatch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", noted)
    prompt = torch.tensor([PROMPT])
    model.generate(
        prompt, use_mtp=True, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0
    )
    proposals = [(before, token_ids) for before, token_ids in asked if token_ids]
    assert len(proposals) > 5
    with runner.new_sequence() as cache:
        for before, token_ids in proposals:
            cache.truncate(min(cache.length, len(PROMPT)))
            runner.forward([Feed(cache, before[cache.length : -1])])
            assert drafted(runner, cache, before[-1], len(token_ids)) == token_ids


def test_wherever_their_keys_come_from(runner: MtpRunner) -> None:
    """In one pass, in chunks beside another sequence, from known pages, in a fork, after rejected tokens."""
    tokens = (PROMPT * 3)[:21]
    with runner.new_sequence() as whole:
        runner.forward([Feed(whole, tokens)])
        expected = drafted(runner, whole, 3, 4)
        whole.remember(tokens)
        with runner.new_sequence() as reusing:
            num_known = reusing.reuse_prefix(tokens, len(tokens) - 1)
            assert num_known >= 16
            runner.forward([Feed(reusing, tokens[num_known:])])
            assert drafted(runner, reusing, 3, 4) == expected
        with whole.fork() as fork:
            assert drafted(runner, fork, 3, 4) == expected
    with runner.new_sequence() as pieces, runner.new_sequence() as other:
        runner.forward([Feed(other, [1, 2, 3]), Feed(pieces, tokens[:1])])
        runner.forward([Feed(pieces, [*tokens[1:12], 8, 8, 8])])
        pieces.truncate(12)
        runner.forward([Feed(pieces, tokens[12:]), Feed(other, [4])])
        assert drafted(runner, pieces, 3, 4) == expected
    runner.pool.check_integrity()


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
