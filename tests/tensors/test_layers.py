"""A model with some of its blocks left out: what it computes, and that it leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specwire.config.blocks import Block, parse_skip
from specwire.engine.batch import Feed
from specwire.engine.layers.blocks import Blocks, ModelBlocks
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError
from specwire.rule.captured import EagerReplay
from tests.support.integrity import check_integrity
from tests.support.tiny_models import VOCAB_SIZE, build

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_oss")
TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, size=24)


def _runner(family: str = "llama", **options: Any) -> ModelRunner:
    return ModelRunner(build(family), num_pages=64, page_size=4, **options)


def _nothing(_: Any, __: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


@torch.inference_mode()
def _reference(family: str, skipped: tuple[Block, ...]) -> Tensor:
    """transformers' own logits, where the outputs of these blocks are replaced by zeros."""
    model = build(family)
    names = {"a": ("self_attn", "attn", "attention"), "m": ("mlp",)}
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    for block in skipped:
        layer = layers[block.layer]
        [module] = [getattr(layer, name) for name in names[block.kind] if hasattr(layer, name)]
        module.register_forward_hook(_nothing)
    model.set_attn_implementation("eager")
    return model(input_ids=torch.from_numpy(TOKENS)[None], use_cache=False).logits[0]


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip", ["a0", "m1", "a0,a1,m0"])
def test_a_block_that_is_left_out_adds_nothing(family: str, skip: str) -> None:
    """In a packed pass beside another sequence, as transformers computes it with zeros in its place."""
    runner, skipped = _runner(family), parse_skip("layers", skip)
    left_out = ModelBlocks(runner.model).without(skipped)
    with runner.new_sequence() as cache, runner.new_sequence() as other:
        feeds = [Feed(other, TOKENS[:5], 1), Feed(cache, TOKENS, len(TOKENS))]
        found = runner.forward_without(left_out, feeds)[1:]
    torch.testing.assert_close(found, _reference(family, skipped), atol=1e-4, rtol=1e-4)
    with runner.new_sequence() as cache:
        whole = runner.forward([Feed(cache, TOKENS, len(TOKENS))])
    torch.testing.assert_close(whole, _reference(family, ()), atol=1e-4, rtol=1e-4)


def test_draft_passes_leave_no_trace() -> None:
    """Keys that they wrote behind the committed ones are dropped, and what follows is as ever.

    A fork shares the last page meanwhile, and complete pages are known.
    """
    runner = _runner()
    left_out = ModelBlocks(runner.model).without(parse_skip("layers", "a0,m1"))
    expected = _in_chunks(runner, None)
    torch.testing.assert_close(_in_chunks(runner, left_out), expected, atol=1e-5, rtol=1e-5)
    check_integrity(runner.pool)
    assert runner.pool.num_held_pages == 0


def _in_chunks(runner: ModelRunner, left_out: Blocks | None) -> Tensor:
    """Logits of the tokens, three in each pass; between two passes a few others are drafted and dropped."""
    rows = []
    with runner.new_sequence() as cache:
        for start in range(0, len(TOKENS), 3):
            rows.append(runner.forward([Feed(cache, TOKENS[start : start + 3], 3)]))
            cache.remember(TOKENS[: start + 3].tolist())
            if left_out is None:
                continue
            length = cache.length
            with cache.fork() as fork:
                for token_id in (5, 6, 7, 8, 9):
                    runner.forward_without(left_out, [Feed(cache, [token_id])])
                runner.forward([Feed(fork, [5, 6])])
                cache.truncate(length)
    return torch.cat(rows)


def test_padded_steps() -> None:
    """As they are captured on CUDA: of a model less some blocks and of the whole one, in turns."""
    found = []
    for runner in (_runner(), _runner(replay=EagerReplay())):
        left_out = ModelBlocks(runner.model).without(parse_skip("layers", "a0,m1"))
        with runner.new_sequence() as cache:
            rows = [runner.forward([Feed(cache, TOKENS[:8], 8)])]
            for token_id in TOKENS[8:12]:
                rows.append(runner.forward_without(left_out, [Feed(cache, [token_id])]))
            cache.truncate(8)
            rows.append(runner.forward([Feed(cache, TOKENS[8:12], 4)]))
        found.append(torch.cat(rows))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_draft_tokens_attend_to_what_the_whole_model_computed() -> None:
    """The first draft pass after a prompt differs from a pass of the smaller model over all of it."""
    runner = _runner()
    left_out = ModelBlocks(runner.model).without(parse_skip("layers", "m0"))
    with runner.new_sequence() as cache, runner.new_sequence() as small:
        runner.forward([Feed(cache, TOKENS[:-1], 1)])
        found = runner.forward_without(left_out, [Feed(cache, TOKENS[-1:], 1)])
        without = runner.forward_without(left_out, [Feed(small, TOKENS, 1)])
    assert not torch.allclose(found, without, atol=1e-3)


def test_the_share_of_weights_that_is_read() -> None:
    """1 of the whole model, and what is left after all blocks is the output layer."""
    model = _runner().model
    blocks = ModelBlocks(model)
    assert blocks.without(()).share_read == 1.0
    of_blocks = (block for layer in model.model.layers for block in (layer.self_attn, layer.mlp))
    weights = sum(weight.nbytes for block in of_blocks for weight in block.parameters())
    output = model.lm_head.weight.nbytes
    assert blocks.without(blocks.all()).share_read == pytest.approx(output / (output + weights), abs=1e-3)


def test_models_whose_blocks_cannot_be_left_out() -> None:
    with pytest.raises(ModelLoadError, match="OPTDecoderLayer is not made of one attention and one MLP"):
        ModelBlocks(_runner("opt").model)
    shared = build("llama")
    shared.model.layers[1].mlp.down_proj.weight = shared.model.layers[0].mlp.down_proj.weight
    runner = ModelRunner(shared, num_pages=4, page_size=4)
    with pytest.raises(ModelLoadError, match="blocks m0 and m1 share weights"):
        ModelBlocks(runner.model)
    with pytest.raises(ModelLoadError, match="has no blocks a7: its layers are 0 to 1"):
        ModelBlocks(_runner().model).without(parse_skip("layers", "a1,a7"))
