"""Block drafters on the paged engine: what they draft, wherever their keys come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation import candidate_generator

from specwire.engine.batch import Feed
from specwire.engine.model import block
from specwire.engine.model.block import BlockRunner
from specwire.engine.model.loading import load_model
from specwire.errors import ContextLengthError, ModelLoadError
from tests.support.blocks import BLOCK_SIZE, save_block_drafter
from tests.support.pairs import save_target
from tests.support.tiny_models import CONTEXT_LEN

PROMPT = [5, 9, 11, 2, 7, 4, 30, 21]


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


def drafted(runner: BlockRunner, cache: Any, token_id: int) -> list[int]:
    """Greedy drafts after a token that follows the cache, which keeps its length."""
    length = cache.length
    states = runner.draft([cache], [token_id])
    cache.truncate(length)
    found: list[int] = runner.logits(states[0, 1:]).argmax(dim=-1).tolist()
    return found


def test_they_draft_what_transformers_does(
    target: Path, drafter: Path, runner: BlockRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All proposals of a whole generation with its own cache and its own rollbacks."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assistant = AutoModel.from_pretrained(drafter, dtype=torch.float32)
    asked: list[tuple[list[int], list[int]]] = []
    propose = candidate_generator.DFlashTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        found = propose(self, input_ids, *args, **keywords)
        before = input_ids[0].tolist()
        asked.append((before, found[0][0, len(before) :].tolist()))
        return found

    monkeypatch.setattr(candidate_generator.DFlashTokenCandidateGenerator, "get_candidates", noted)
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"do_sample": False, "speculation_type": "dflash", "assistant_model": assistant}
    model.generate(torch.tensor([PROMPT]), **settings)
    proposals = [(before, token_ids) for before, token_ids in asked if token_ids]
    assert len(proposals) > 5
    with runner.new_sequence() as cache:
        for before, token_ids in proposals:
            cache.truncate(min(cache.length, len(PROMPT)))
            runner.forward([Feed(cache, before[cache.length : -1])])
            assert drafted(runner, cache, before[-1]) == token_ids


def test_wherever_their_keys_come_from(runner: BlockRunner) -> None:
    """In one pass, in chunks beside another sequence, from known pages, in a fork, after rejected tokens."""
    tokens = (PROMPT * 3)[:21]
    with runner.new_sequence() as whole:
        runner.forward([Feed(whole, tokens)])
        expected = drafted(runner, whole, 3)
        whole.remember(tokens)
        with runner.new_sequence() as reusing:
            num_known = reusing.reuse_prefix(tokens, len(tokens) - 1)
            assert num_known >= 16
            runner.forward([Feed(reusing, tokens[num_known:])])
            assert drafted(runner, reusing, 3) == expected
        with whole.fork() as fork:
            assert drafted(runner, fork, 3) == expected
    with runner.new_sequence() as pieces, runner.new_sequence() as other:
        runner.forward([Feed(other, [1, 2, 3]), Feed(pieces, tokens[:1])])
        runner.forward([Feed(pieces, [*tokens[1:12], 8, 8, 8])])
        pieces.truncate(12)
        runner.forward([Feed(pieces, tokens[12:]), Feed(other, [4])])
        states = runner.draft([other, pieces], [9, 3])
        assert runner.logits(states[1, 1:]).argmax(dim=-1).tolist() == expected


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
