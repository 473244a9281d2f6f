"""What a device is called, what a checkpoint becomes on it, and quantised checkpoints."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers import AutoHfQuantizer

from specwire.config.extras import QUANTISERS
from specwire.config.services import VerifyConfig
from specwire.engine.batch import Feed
from specwire.engine.model import loading
from specwire.engine.model.loading import load_model
from specwire.engine.model.memory import select_device
from specwire.engine.model.packing import pack_linears
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ConfigError, ModelLoadError
from specwire.rule.captured import EagerReplay
from tests.support.quantised import save_compressed, save_fp8, set_quantisation
from tests.support.tiny_models import build, save

_SETTINGS: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"load_in_4bit": True},
    "gptq": {"bits": 4},
    "awq": {"bits": 4},
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}},
}


def test_a_device_that_is_not_there_is_named() -> None:
    assert select_device("cpu").type == "cpu"
    for name, problem in [
        ("gpu", "is neither cpu nor cuda nor cuda:N"),
        ("mps", "only cpu and cuda are served"),
        ("cuda:97", "finds no CUDA device here" if not torch.cuda.is_available() else "the last of"),
    ]:
        with pytest.raises(ConfigError, match=rf"^--device {name}: .*{problem}"):
            select_device(name)


def test_pages_suit_the_device_unless_their_size_is_given() -> None:
    assert VerifyConfig().page_len == 16
    assert VerifyConfig(device="cuda:1").page_len == 256
    assert VerifyConfig(device="cuda:1", page_size=32).page_len == 32
    assert VerifyConfig(device="cuda", num_kv_tokens=1024).num_pages == 4
    with pytest.raises(ConfigError, match="--num-kv-tokens 100: is less than a page"):
        VerifyConfig(device="cuda", num_kv_tokens=100)


@pytest.mark.parametrize(
    ("stored", "asked", "device", "wanted"),
    [
        (torch.float32, "auto", "cuda:0", "bfloat16"),
        (None, "auto", "cuda", "bfloat16"),
        ("float16", "auto", "cuda:0", "auto"),
        (torch.bfloat16, "auto", "cuda:0", "auto"),
        (torch.float32, "auto", "cpu", "auto"),
        (torch.float32, "float32", "cuda:0", "float32"),
    ],
)
def test_bfloat16_is_the_default_on_cuda(stored: Any, asked: str, device: str, wanted: str) -> None:
    config = SimpleNamespace(dtype=stored)
    assert loading.weights_dtype(config, asked, device) == wanted
    assert loading.placement(config, device) == {}


def test_quantised_weights_are_left_to_their_quantiser() -> None:
    config = SimpleNamespace(dtype=torch.float32, quantization_config={"quant_method": "gptq"})
    assert loading.weights_dtype(config, "auto", "cuda:0") == "auto"
    assert loading.placement(config, "cuda:0") == {"device_map": {"": "cuda:0"}}
    assert loading.placement(config, "cpu") == {}


class _Posing(torch.Tensor):
    """Stands for a quantised weight, which looks like bfloat16 from outside."""


def test_weights_of_another_kind_are_not_packed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)
    first = model[0]
    assert isinstance(first, nn.Linear)
    posing = first.weight.detach().clone().as_subclass(_Posing)
    first.weight = nn.Parameter(posing, requires_grad=False)
    assert type(first.weight.data) is _Posing
    assert pack_linears(model) <= 1
    assert "forward" not in vars(first)


@pytest.mark.parametrize("method", QUANTISERS)
def test_transformers_needs_the_packages_too(method: str) -> None:
    """What is refused here is refused by transformers, for the same lack."""
    missing = [each for each in QUANTISERS[method] if find_spec(each) is None]
    wanted = {"quant_method": method, **_SETTINGS.get(method, {})}
    refused = pytest.raises(Exception, match=f"(?i){'|'.join(missing).replace('_', '.')}")
    with refused if missing else nullcontext():
        AutoHfQuantizer.from_config(wanted, pre_quantized=True).validate_environment(device_map=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers keeps 8-bit floats where there is a GPU")
def test_a_quantised_checkpoint_is_served(tmp_path: Path) -> None:
    """transformers turns 8-bit floats into bfloat16 where there is no GPU to compute with them."""
    pytest.importorskip("accelerate")
    model = load_model(save_fp8(tmp_path))
    tokens = list(range(5, 45))
    with torch.inference_mode():
        exact = build("llama")(input_ids=torch.tensor([tokens])).logits[0]
    runner = ModelRunner(model, num_pages=8, replay=EagerReplay())
    with runner.new_sequence() as cache:
        logits = runner.forward([Feed(cache, tokens, len(tokens))])
    agreement = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
    assert agreement > 0.7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_packed_until_the_first_pass_are_served(dtype: str, tmp_path: Path) -> None:
    """compressed-tensors has no plain weights before it: none is there for us to pack. The others are, and
    it wraps the method that runs each layer."""
    pytest.importorskip("compressed_tensors")
    config = save_compressed(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}))
    model = load_model(tmp_path)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, torch.Tensor)


def test_experts_in_4_bits_are_served(tmp_path: Path) -> None:
    """As gpt-oss stores them: blocks of 32 with a common exponent."""
    pytest.importorskip("accelerate")
    save(build("gpt_oss", intermediate_size=32), tmp_path)
    path = tmp_path / "model.safetensors"
    weights, generator = load_file(path), torch.Generator().manual_seed(0)
    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, _, num_rows = weights.pop(name).shape
        shape = (num_experts, num_rows, 1)
        weights[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        weights[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)
    save_file(weights, path, metadata={"format": "pt"})
    kept = ["self_attn", "router", "lm_head"]
    set_quantisation(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    assert load_model(tmp_path).model.layers[0].mlp.experts.down_proj.dtype.is_floating_point


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("no-such-method", "knows no quantisation 'no-such-method'"),
        (None, "knows no quantisation ''"),
        (
            "eetq",
            "its weights are quantised by eetq, which transformers cannot read here without kernels; pip",
        ),
        ("spqr", "its weights are quantised by spqr: "),  # by transformers itself
    ],
)
def test_a_quantised_checkpoint_that_cannot_be_loaded_is_refused_by_name(
    method: str | None, reason: str, tmp_path: Path
) -> None:
    set_quantisation(save(build("llama"), tmp_path), {"quant_method": method})
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
