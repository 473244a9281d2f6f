"""Quantised weights on a device, alone and over two ranks: what no test on a CPU can tell.

On a CPU transformers turns 8-bit floats into plain numbers when it reads them. On a GPU they stay as they
are, and a rank has its blocks and their scales.
"""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.findings import Findings
from benchmarks.ranks import NUM_RANKS, run_ranks
from specwire.engine.batch import Feed
from specwire.engine.group.sharding import load_shard
from specwire.engine.model.loading import load_model
from specwire.engine.model.runner import ModelRunner, relative_error

_BLOCK = 128
_SMALL = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1024}
_SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False}
_MOST_ERROR = 0.1
"""Of a row of bfloat16 logits, relative to their spread."""


def check(findings: Findings, device: torch.device) -> None:
    """A small model by each method at hand: its self-check, and its logits on two ranks, if two devices are.

    Raises:
        ModelLoadError: it is not computed as transformers does, or not read.
        AssertionError: two ranks have other logits than one.
    """
    needed = ("accelerate", "kernels") if device.type == "cuda" else ("accelerate",)
    if missing := [name for name in needed if find_spec(name) is None]:
        findings.facts["quantised weights"] = f"not measured: {', '.join(missing)} not installed"
        return
    methods = {"fp8": _save_fp8} | ({"torchao": _save_torchao} if find_spec("torchao") else {})
    num_devices = torch.cuda.device_count() if device.type == "cuda" else NUM_RANKS
    for method, save in methods.items():
        with tempfile.TemporaryDirectory() as directory:
            save(Path(directory))
            alone = _logits(load_model(directory, dtype="bfloat16", device=str(device)))
            findings.facts[f"{method} alone"] = "as transformers' own"
            if num_devices < NUM_RANKS:
                findings.facts[f"{method} on two ranks"] = "not measured: one device"
                continue
            backend = "nccl" if device.type == "cuda" else "gloo"
            shared = run_ranks(NUM_RANKS, _logits_on_ranks, directory, backend=backend)
        error = relative_error(torch.from_numpy(shared), torch.from_numpy(alone))
        assert error < _MOST_ERROR, f"{method} on two ranks is off by {error:.2g} of the logits' spread"
        findings.facts[f"{method} on two ranks"] = f"off by {error:.2g} of the logits' spread"


def _save_plain(directory: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_SMALL))
    model.to(torch.bfloat16).save_pretrained(directory)


def _save_fp8(directory: Path) -> None:
    """With a scale for each block of 128 by 128."""
    _save_plain(directory)
    path, config = directory / "model.safetensors", directory / "config.json"
    weights = load_file(path)
    for name in [each for each in weights if each.endswith("_proj.weight")]:
        blocks = weights[name].float().unfold(0, _BLOCK, _BLOCK).unfold(1, _BLOCK, _BLOCK)
        scales = blocks.abs().amax((2, 3)) / torch.finfo(torch.float8_e4m3fn).max
        spread = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        weights[name] = (weights[name].float() / spread).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
    save_file(weights, path, metadata={"format": "pt"})
    wanted = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK], "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": wanted}))


def _save_torchao(directory: Path) -> None:
    """In 8-bit integers with a scale for each row."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    _save_plain(directory)
    wanted = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", quantization_config=wanted)
    model.save_pretrained(directory)


def _logits_on_ranks(num_ranks: int, source: str) -> np.ndarray:
    """Runs on each rank."""
    return _logits(load_shard(source, dtype="bfloat16", num_ranks=num_ranks)[0])


def _logits(model: Any) -> np.ndarray:
    """Of a prompt of 64 tokens, float32 [64, vocab_size]."""
    runner = ModelRunner(model, num_pages=8, page_size=16)
    with runner.new_sequence() as cache:
        return runner.forward([Feed(cache, list(range(64)), 64)]).float().cpu().numpy()
