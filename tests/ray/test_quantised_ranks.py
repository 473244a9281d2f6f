"""Quantised weights over several ranks: transformers' own text of them, and refusals before a rank starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.ranks import run_ranks
from specwire import ModelLoadError, SamplingParams
from specwire.config.services import VerifyConfig
from specwire.config.stack import UpConfig
from specwire.engine import boot
from specwire.engine.group.quantised import Cutter
from specwire.engine.group.runner import GroupRunner
from specwire.engine.model import loading
from specwire.errors import ConfigError
from tests.support import quantised, rank_memory
from tests.support.fixtures import entered
from tests.support.harness import local_stack, started_services
from tests.support.pairs import save_good_draft, save_target
from tests.support.ray_cluster import connected_cluster
from tests.support.tiny_models import written_by_transformers
from tests.support.together import generated
from verify_service.verifier import VerifyDecider

pytest.importorskip("ray")

NUM_TOKENS = 96
PROMPT = np.random.default_rng(5).integers(3, 97, 40).tolist()
#: Method → what saves a model of a family, and the package that it needs besides accelerate.
METHODS: dict[str, tuple[Callable[..., Path], str]] = {
    "fp8": (quantised.save_fp8, "accelerate"),
    "compressed-tensors": (quantised.save_compressed, "compressed_tensors"),
    "torchao": (quantised.save_int8, "torchao"),
}
#: Families, an output layer of which the last rank has less, and parameters beside the weights.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied, odd vocabulary": ("llama", {"tie_word_embeddings": True, "vocab_size": 101}),
    "biases": ("qwen2", {}),
    "norms of heads": ("qwen3", {}),
}
CUDA = pytest.mark.skipif(
    torch.cuda.is_available(), reason="transformers keeps 8-bit floats where there is a GPU"
)


cluster = entered(connected_cluster)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@CUDA
def test_text_is_that_of_transformers_alone_and_on_two_ranks(
    cluster: Any, method: str, tmp_path: Path
) -> None:
    """Greedy, over real gRPC, plain and with four draft tokens from a draft that is mostly right."""
    save, package = METHODS[method]
    pytest.importorskip(package)
    target, draft = save(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected = written_by_transformers(model, PROMPT, NUM_TOKENS)
    plain = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0, num_draft_tokens=0)
    drafted = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0, num_draft_tokens=4)
    for num_ranks in (1, 2):
        options = {"tensor_parallel_size": num_ranks, "num_threads": 1}
        with started_services() as services, local_stack(target, draft, verify_options=options) as stack:
            done = generated(stack.address, [plain, drafted], PROMPT)
            assert isinstance(services["verify"].runner, GroupRunner) == (num_ranks == 2)
        assert [list(each.token_ids) for each in done] == [expected, expected]
        assert done[0].speculation.num_draft_tokens == 0
        assert 0 < done[1].speculation.num_accepted_tokens < done[1].speculation.num_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@CUDA
def test_logits_of_every_shape_are_those_of_one_rank(method: str, tmp_path: Path) -> None:
    save, package = METHODS[method]
    pytest.importorskip(package)
    sources = [str(save(tmp_path / name, family, **shape)) for name, (family, shape) in SHAPES.items()]
    found = run_ranks(2, rank_memory.logits_on_ranks, sources, PROMPT)
    for source, (logits, description, num_own) in zip(sources, found, strict=True):
        model = loading.load_model(source)
        expected = rank_memory.logits_of(model, PROMPT)
        np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=source)
        assert description["vocab_size"] == model.get_output_embeddings().out_features
        assert num_own < 0.6 * description["num_parameters"], "a rank keeps its own rows and columns"


class TestCutting:
    """Layers of 8-bit floats, as they stay on a GPU: what a rank keeps of numbers, scales and biases."""

    def test_a_share_times_its_scales_is_the_share_of_the_product(self) -> None:
        for style, dim in (("colwise", 0), ("rowwise", 1)):
            whole = _layer(num_inputs=64, num_outputs=32)
            shares = [_cut(_layer(num_inputs=64, num_outputs=32), style, rank) for rank in range(2)]
            products = torch.cat([_product(each) for each in shares], dim)
            torch.testing.assert_close(products, _product(whole), rtol=0, atol=0)
            biases = [each.bias for each in shares]
            expected = whole.bias.chunk(2) if dim == 0 else (whole.bias, whole.bias)
            assert all(torch.equal(own, wanted) for own, wanted in zip(biases, expected, strict=True))

    def test_a_block_that_two_ranks_would_share_is_refused(self) -> None:
        with pytest.raises(
            ModelLoadError, match=r"layer.weight_scale_inv: 48 rows in blocks of 16 cannot be"
        ):
            _cut(_layer(num_inputs=64, num_outputs=48), "colwise", 0)

    def test_activations_that_all_inputs_scale_are_refused(self) -> None:
        """With one scale for a weight; a share of the rows has all inputs."""
        layer = _layer(num_inputs=64, num_outputs=32, block=None)
        assert torch.equal(_cut(layer, "colwise", 1).weight_scale_inv, layer.weight_scale_inv)
        with pytest.raises(ModelLoadError, match="activations are quantised by all inputs of a layer"):
            _cut(_layer(num_inputs=64, num_outputs=32, block=None), "rowwise", 0)

    def test_what_has_no_rows_and_columns_is_refused(self) -> None:
        layer = _layer(num_inputs=64, num_outputs=32)
        layer.register_parameter("absmax", nn.Parameter(torch.ones(7)))
        with pytest.raises(
            ModelLoadError, match=r"layer.absmax: ranks cannot have shares of Parameter of \[7\]"
        ):
            _cut(layer, "rowwise", 0)


def _layer(num_inputs: int, num_outputs: int, block: int | None = 16) -> Any:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    layer = FP8Linear(num_inputs, num_outputs, block_size=block and (block, block), has_bias=True)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn.to(parameter.dtype)
    return layer


def _cut(layer: Any, style: str, rank: int) -> Any:
    class Model(nn.Module):
        tp_plan = {"layer": style}  # noqa: RUF012

    model = Model()
    model.layer = layer
    for name, _ in list(layer.named_parameters()):
        Cutter(rank, 2).cut(model, f"layer.{name}")
    return layer


def _product(layer: Any) -> torch.Tensor:
    """Numbers times scales, [num_outputs, num_inputs]."""
    rows, columns = layer.block_size
    scales = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return (layer.weight.float() * scales).detach()


#: `quantization_config` → why ranks cannot share the weights.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "awq", "bits": 4},
        "quantised by awq, and cannot be spread over ranks: its layers hold",
    ),
    ({"load_in_4bit": True}, "quantised by bitsandbytes, and cannot be spread over ranks: its layers hold"),
    (
        {"quant_method": "mxfp4"},
        "by mxfp4, and cannot be spread over ranks: compressed-tensors, fp8 and torchao",
    ),
    (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        "by torchao, and cannot be spread over ranks: Int4WeightOnlyConfig is none of",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"input_activations": {"num_bits": 8}}},
        },
        "cannot be spread over ranks: activations are quantised too",
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}},
        "cannot be spread over ranks: it has 2 groups of layers",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {}},
            "kv_cache_scheme": {"num_bits": 8},
        },
        "cannot be spread over ranks: the KV cache is quantised too",
    ),
]


class TestWhatIsRefused:
    @pytest.mark.parametrize(("wanted", "reason"), REFUSED)
    def test_by_a_command_before_anything_starts(
        self, wanted: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether the method's packages are here or not."""
        from specwire.config import extras, preflight

        monkeypatch.setattr(extras, "is_installed", lambda module: True)
        target = quantised.set_quantisation(save_target(tmp_path / "target"), wanted)
        flags: dict[str, Any] = {"target": str(target), "draft": "none", "address": "127.0.0.1:0"}
        preflight.check(UpConfig(**flags))
        with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
            preflight.check(UpConfig(**flags, tensor_parallel_size=2))
        assert str(caught.value).startswith(f"--tensor-parallel-size 2: --target {target}: its weights are")

    def test_by_a_service_before_a_rank_starts(self, tmp_path: Path) -> None:
        model = quantised.set_quantisation(save_target(tmp_path, "phi3"), {"quant_method": "fp8"})
        problem = "quantised weights are cut by rows or columns alone, and layers.*.self_attn.o_proj is"
        with pytest.raises(ModelLoadError, match=re.escape(problem)):
            boot.start(VerifyConfig(model=str(model), tensor_parallel_size=2), "verify", VerifyDecider())
