"""Passes with LoRA adapters, which are at random: right, and what they cost beside passes without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.passes import PAGE_LEN, pass_ms
from benchmarks.report import summarise
from specwire.engine.model import lora
from specwire.engine.model.loading import check_adapter, load_model
from specwire.engine.model.lora import Adapter, Factors
from specwire.engine.model.runner import ModelRunner
from specwire.rule.captured import CudaReplay, EagerReplay

_NUM_ADAPTERS, _RANK = 4, 16


def measure(
    findings: Findings, source: Path, device: torch.device, sizes: Sequence[tuple[int, int]], num_passes: int
) -> None:
    """Four adapters on all linear layers: each checked as at load, then passes of (streams, tokens a stream).

    Raises:
        ModelLoadError: an adapter's logits differ from those of the model's own pass.
    """
    model = load_model(source, dtype="bfloat16", device=str(device))
    lora.attach(model, [_at_random(model, seed) for seed in range(_NUM_ADAPTERS)])
    for number in range(1, _NUM_ADAPTERS + 1):
        check_adapter(model, number)
    replay = CudaReplay() if device.type == "cuda" else EagerReplay()
    runner = ModelRunner(model, num_pages=16, page_size=PAGE_LEN, replay=replay)
    for num_streams, num_tokens in sizes:
        kinds = {"none": [0] * num_streams, "mixed": [i % (_NUM_ADAPTERS + 1) for i in range(num_streams)]}
        kinds["one"] = [1] * num_streams
        for kind, adapters in kinds.items():
            times_ms = pass_ms(runner, num_streams, num_tokens, num_passes, adapters)
            findings.adapters_ms[f"{num_streams} × {num_tokens}, {kind}"] = summarise(times_ms)


def _at_random(model: Any, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    head, factors = model.get_output_embeddings(), {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            down = torch.randn(_RANK, layer.in_features, generator=generator) / layer.in_features**0.5
            up = torch.randn(layer.out_features, _RANK, generator=generator) / _RANK**0.5
            factors[path] = Factors(down, up, scaling=0.1)
    return Adapter(f"random {seed}", factors)
