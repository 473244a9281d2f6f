"""Drafters whose keys lie in the target's pages: layers for multi-token prediction, and a block drafter.

What they draft is what transformers drafts with them, wherever their keys come from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation import candidate_generator

from specwire.engine.batch import Feed
from specwire.engine.model import block, mtp
from specwire.engine.model.block import BlockRunner
from specwire.engine.model.loading import load_model
from specwire.engine.model.mtp import MtpRunner
from tests.support import blocks
from tests.support import mtp as mtp_targets
from tests.support.pairs import save_target
from tests.support.tiny_models import MTP_FAMILIES

PROMPT = [5, 9, 11, 2, 7, 4, 30, 21]
NUM_DRAFTS = 4


class Drafter(NamedTuple):
    """A runner, and what transformers needs to draft alike.

    Attributes:
        drafted: greedy drafts after a token that follows a cache, which keeps its length.
        generator: of transformers; `settings` of its `generate` choose it.
    """

    target: Path
    runner: Any
    drafted: Callable[[Any, Any, int, int], list[int]]
    generator: type[Any]
    settings: dict[str, Any]

    def model(self) -> Any:
        """transformers' own."""
        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32)
        if isinstance(self.runner, MtpRunner):
            mtp._name_layers(model, model.config.num_hidden_layers, model.config.num_mtp_layers)
        return model


@pytest.fixture(scope="module", params=[*MTP_FAMILIES, "block"])
def drafter(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    directory: Path = tmp_path_factory.mktemp("drafter")
    if request.param != "block":
        target = mtp_targets.save_mtp_target(directory / "target", request.param, spread=0.6)
        model = load_model(target, dtype="float32")
        return Drafter(
            target,
            MtpRunner(model, mtp.load(model), num_pages=64, page_size=4),
            mtp_targets.drafted,
            candidate_generator.MTPCandidateGenerator,
            {"use_mtp": True},
        )
    target, saved = save_target(directory / "target"), blocks.save_block_drafter(directory / "drafter")
    model = load_model(target, dtype="float32")
    assistant = AutoModel.from_pretrained(saved, dtype=torch.float32)
    return Drafter(
        target,
        BlockRunner(model, block.load(saved, model), num_pages=64, page_size=4),
        blocks.drafted,
        candidate_generator.DFlashTokenCandidateGenerator,
        {"speculation_type": "dflash", "assistant_model": assistant},
    )


def test_they_draft_what_transformers_does(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """All proposals of a whole generation with its own cache and its own rollbacks."""
    model, runner = drafter.model(), drafter.runner
    asked: list[tuple[list[int], list[int]]] = []
    propose = drafter.generator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        found = propose(self, input_ids, *args, **keywords)
        before = input_ids[0].tolist()
        asked.append((before, found[0][0, len(before) :].tolist()))
        return found

    monkeypatch.setattr(drafter.generator, "get_candidates", noted)
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    model.generate(torch.tensor([PROMPT]), do_sample=False, **settings, **drafter.settings)
    proposals = [(before, token_ids) for before, token_ids in asked if token_ids]
    assert len(proposals) > 5
    with runner.new_sequence() as cache:
        for before, token_ids in proposals:
            cache.truncate(min(cache.length, len(PROMPT)))
            runner.forward([Feed(cache, before[cache.length : -1])])
            assert drafter.drafted(runner, cache, before[-1], len(token_ids)) == token_ids


def test_wherever_their_keys_come_from(drafter: Drafter) -> None:
    """In one pass, in chunks beside another sequence, from known pages, in a fork, after rejected tokens."""
    runner, tokens = drafter.runner, (PROMPT * 3)[:21]

    def drafted(cache: Any) -> list[int]:
        return drafter.drafted(runner, cache, 3, NUM_DRAFTS)

    with runner.new_sequence() as whole:
        runner.forward([Feed(whole, tokens)])
        expected = drafted(whole)
        whole.remember(tokens)
        with runner.new_sequence() as reusing:
            num_known = reusing.reuse_prefix(tokens, len(tokens) - 1)
            assert num_known >= 16
            runner.forward([Feed(reusing, tokens[num_known:])])
            assert drafted(reusing) == expected
        with whole.fork() as fork:
            assert drafted(fork) == expected
    with runner.new_sequence() as pieces, runner.new_sequence() as other:
        runner.forward([Feed(other, [1, 2, 3]), Feed(pieces, tokens[:1])])
        runner.forward([Feed(pieces, [*tokens[1:12], 8, 8, 8])])
        pieces.truncate(12)
        runner.forward([Feed(pieces, tokens[12:]), Feed(other, [4])])
        assert drafted(pieces) == expected
        if isinstance(runner, BlockRunner):
            states = runner.draft([other, pieces], [9, 3])
            assert runner.logits(states[1, 1:]).argmax(dim=-1).tolist() == expected
    runner.pool.check_integrity()
