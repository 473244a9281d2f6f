"""Packed linear layers: the same products, bit for bit, and no weight twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specwire.engine import private
from specwire.engine.model import packing
from specwire.engine.model.packing import pack_linears
from tests.support import tiny_models

HAS_KERNELS = private.can_pack_weights(torch.bfloat16)
packs = pytest.mark.skipif(not HAS_KERNELS, reason="this processor has no bfloat16 kernels")


@packs
@pytest.mark.parametrize("num_tokens", [1, 5, 80, 300])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_the_products_are_the_same(num_tokens: int, bias: bool) -> None:
    torch.manual_seed(num_tokens)
    plain = nn.Linear(192, 320, bias=bias).to(torch.bfloat16)
    expected = plain(tokens := torch.randn(1, num_tokens, 192).to(torch.bfloat16))
    assert pack_linears(plain) == 1
    torch.testing.assert_close(plain(tokens), expected, rtol=1e-2, atol=1e-2)


@packs
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@torch.inference_mode()
def test_a_packed_model_says_the_same(family: str) -> None:
    token_ids = torch.arange(5, 25)[None]
    model = tiny_models.build(family).to(torch.bfloat16)
    expected = model(input_ids=token_ids, use_cache=False).logits
    num_parameters = sum(p.numel() for p in model.parameters())
    num_packed = pack_linears(model)
    assert num_packed >= 1, "gpt2 has its output layer only"
    found = model(input_ids=token_ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert sum(p.numel() for p in model.parameters()) == num_parameters


@packs
def test_a_weight_of_its_own_is_freed_and_a_shared_one_kept() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32, dtype=torch.bfloat16)
            self.inner = nn.Linear(32, 32, dtype=torch.bfloat16)
            self.head = nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embedding.weight

    model = Tied()
    before = model.embedding.weight.detach().clone()
    assert pack_linears(model) == 2
    assert model.inner.weight.untyped_storage().nbytes() == 2
    assert model.inner.weight.shape == (32, 32)
    torch.testing.assert_close(model.embedding.weight.detach(), before)


@packs
@torch.inference_mode()
def test_a_bias_that_is_taken_away_later_is_not_added() -> None:
    """A rank adds the bias of a row-wise layer itself, once, to the sum of all ranks' products."""
    linear = nn.Linear(32, 48, dtype=torch.bfloat16)
    tokens = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    expected = nn.functional.linear(tokens, linear.weight)
    pack_linears(linear)
    linear.bias = None  # type: ignore[assignment]
    torch.testing.assert_close(linear(tokens), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not private.can_pack_weights(torch.float32), reason="this torch has no oneDNN")
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("is_mkl_slow", "copies"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("num_outputs", [200, 256, 4096])
@torch.inference_mode()
def test_of_float32_weights_large_ones_are_packed_and_others_lie_by_input(
    num_outputs: int, is_mkl_slow: bool, copies: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_is_mkl_slow", lambda: is_mkl_slow)
    plain = nn.Linear(256, num_outputs, bias=bias)
    weight, tokens = plain.weight, [torch.randn(5, 256), torch.randn(1, 256), torch.randn(2, 3, 256)]
    expected = list(map(plain, tokens))
    assert pack_linears(plain, copies=copies) == 1
    torch.testing.assert_close(list(map(plain, tokens)), expected)
    if num_outputs == 4096:
        assert plain.weight.untyped_storage().nbytes() == 4
    else:
        assert plain.weight is weight
        assert weight.t().is_contiguous()
        weight.zero_()  # which single tokens read, and others where they have no copy of their own
        is_copied = is_mkl_slow and copies and num_outputs == 256
        found = [plain(some) - (plain.bias if bias else 0) for some in tokens]
        assert [bool(each.any()) for each in found] == [is_copied, False, is_copied]


@torch.inference_mode()
def test_other_formats_and_other_layers_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(tokens)

    model = nn.Sequential(nn.Linear(512, 512, dtype=torch.float64), Doubled(8, 8, dtype=torch.bfloat16))
    assert pack_linears(model) == 0


@torch.inference_mode()
def test_where_nothing_is_packed_the_model_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "can_pack_weights", lambda dtype: False)
    plain = nn.Linear(8, 8, dtype=torch.bfloat16)
    assert pack_linears(plain) == 0
    assert plain(torch.ones(1, 8, dtype=torch.bfloat16)).shape == (1, 8)
