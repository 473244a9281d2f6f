"""Tiny quantised checkpoints, as the packages that quantise write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import build, save

BLOCK = 16


def save_fp8(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    """Linear layers in 8-bit floats, with a scale for each block of 16 by 16."""
    save(build(family, **overrides), directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name in [n for n in weights if n.endswith("_proj.weight")]:
        blocks = weights[name].unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
        scales = blocks.abs().amax((2, 3)) / 448
        spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weights[name] = (weights[name] / spread).to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = scales
    save_file(weights, path, metadata={"format": "pt"})
    wanted = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return set_quantisation(directory, wanted)


def save_int8(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    """Linear layers in torchao's 8-bit integers, with a scale for each row."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    plain = save(build(family, **overrides), directory.with_name(f"{directory.name}-plain"))
    wanted = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=wanted)
    model.save_pretrained(directory)
    return directory


def save_compressed(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    """Linear layers in 4-bit integers of compressed-tensors, packed, with a scale for each 8 of a row."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = build(family, **overrides)
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=8, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    wanted = QuantizationConfig(
        config_groups={"group": scheme},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="frozen",
    )
    apply_quantization_config(model, wanted)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.data.unfold(1, 8, 8)
            module.weight_scale.data.copy_(groups.abs().amax(2) / 7)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(str(directory))
    return directory


def set_quantisation(directory: Path, wanted: dict[str, Any]) -> Path:
    """Declare in a saved config how the weights are quantised."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": wanted}))
    return directory
