"""What a target drafts with by itself, on its device: drafters at random, which cost what trained ones do.

Of a checkpoint with layers for multi-token prediction there is none here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import dflash_training
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.passes import GAMMA, PAGE_LEN, pass_ms, timed_s
from benchmarks.report import summarise
from specwire.config.blocks import parse_skip
from specwire.config.own_methods import DFLASH, EAGLE3, HEADS, LAYERS
from specwire.engine.attention.paged import ATTENTION_NAME
from specwire.engine.batch import Feed
from specwire.engine.device import DraftQuery
from specwire.engine.heads.model import Head, Heads, TargetModules
from specwire.engine.layers.blocks import ModelBlocks
from specwire.engine.model import block, eagle3
from specwire.engine.model.block import BlockDrafter, BlockRunner
from specwire.engine.model.eagle3 import Eagle3Runner
from specwire.engine.model.own import HeadsRunner, LayersRunner
from specwire.engine.model.runner import ModelRunner
from specwire.rule.captured import CudaReplay, EagerReplay
from tools.eagle3 import training

_NUM_PAGES = 12
_NUM_FEATURES = 1024


def _heads(model: Any, **pages: Any) -> ModelRunner:
    size, embedded = model.config.hidden_size, model.get_input_embeddings().embedding_dim
    read = size + embedded
    shapes = (_NUM_FEATURES, read), (_NUM_FEATURES,), (size, read + _NUM_FEATURES), (size,)
    head = Head(*(torch.randn(*shape) / shape[-1] ** 0.5 for shape in shapes))
    return HeadsRunner(model, Heads([head] * 4, TargetModules.of(model), model.device, model.dtype), **pages)


def _layers(model: Any, **pages: Any) -> ModelRunner:
    for module in model.modules():
        module._compiled_call_impl = None  # as a service runs them that leaves layers out
    left_out = ModelBlocks(model).without(parse_skip("layers", "m1,m2"))
    return LayersRunner(model, left_out, **pages)


def _block(model: Any, **pages: Any) -> ModelRunner:
    layers = dflash_training.untrained(model.config).to(model.device, model.dtype).eval()
    layers.set_attn_implementation(ATTENTION_NAME)
    drafter = BlockDrafter(layers, model.get_input_embeddings(), model.get_output_embeddings())
    block.self_check(model, drafter)
    return BlockRunner(model, drafter, **pages)


def _eagle3(model: Any, **pages: Any) -> ModelRunner:
    made = training.layer_config(model, 0)
    drafter = training.untrained(model, made, torch.arange(made["vocab_size"]))
    drafter.lm_head.reset_parameters()  # the target's may be packed
    drafter = drafter.to(model.device, model.dtype).eval().requires_grad_(False)
    drafter.target_ids = drafter.target_ids.to(model.device)
    eagle3.self_check(model, drafter)
    return Eagle3Runner(model, drafter, **pages)


_MAKERS: Mapping[str, Callable[..., ModelRunner]] = {
    HEADS: _heads,
    DFLASH: _block,
    EAGLE3: _eagle3,
    LAYERS: _layers,
}


def phases(
    findings: Findings, model: Any, prompt: Sequence[int], num_passes: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """For each method: checked against the model's own layers as a service does, then its passes."""
    for source in _MAKERS:
        yield f"drafts with {source}", partial(_measure, findings, source, model, prompt, num_passes)


def _measure(findings: Findings, source: str, model: Any, prompt: Sequence[int], num_passes: int) -> None:
    """A pass of the target that keeps what drafts read, and the first pass of a proposal of one stream, until
    its token is on the host."""
    is_cuda = model.device.type == "cuda"
    page_len = PAGE_LEN if is_cuda else 16
    num_pages = _NUM_PAGES + len(prompt) // page_len
    replay = CudaReplay() if is_cuda else EagerReplay()
    runner = _MAKERS[source](model, num_pages=num_pages, page_size=page_len, replay=replay)
    try:
        runner.warm()
        times_ms = pass_ms(runner, 1, GAMMA + 1, num_passes)
        findings.verify_ms[f"1 × {GAMMA + 1}, with {source}"] = summarise(times_ms)
        with runner.new_sequence() as cache:
            runner.forward([Feed(cache, prompt, 1)])
            assert runner.draft_shape is not None
            feeds = [] if source == HEADS else [Feed(cache, [prompt[-1], *runner.draft_shape.masks])]
            zero, last = np.zeros(1, np.int64), np.array(prompt[-1:], np.int64)
            query = DraftQuery(True, zero, last, zero)

            def run() -> None:
                runner.run_draft(feeds, query, None, lambda _, logits: logits.argmax(dim=-1).tolist())
                cache.truncate(len(prompt))

            for _ in range(3):
                run()
            times_ms = [timed_s(run, runner.device) * 1e3 for _ in range(num_passes)]
            findings.own_ms[source] = summarise(times_ms)
    finally:
        runner.close()
