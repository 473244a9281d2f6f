"""Lays out weights of linear layers in the order in which a CPU's matrix kernels read them.

`torch.nn.functional.linear` reorders a bfloat16 weight in every call, which costs as much as the product
itself when few tokens are run; a float32 one it gives to MKL, where five tokens times a large one take 1.2 to
1.4 (a Xeon) or 4.7 times (an AMD EPYC) as long as by oneDNN. Such weights are packed once, with the operators
that torch's own compiler uses when it freezes a model for inference. What bfloat16 products come to is the
same, bit for bit.

A call of oneDNN takes 25 us more than one of MKL, so that small float32 weights stay with MKL. They are laid
out by input, which its products of few tokens read faster than the same numbers by output, and are multiplied
without what `torch.nn.functional.linear` does around a product. Where MKL is slow, as on that EPYC, single
tokens alone are multiplied so, and several with a packed copy.
"""

from __future__ import annotations

import functools
import timeit
from collections import Counter
from itertools import chain

import torch
from torch import Tensor, nn

from specwire.engine.private import can_pack_weights, pack_weight, packed_linear

_TYPICAL_TOKENS = 64
"""The kernels choose the order by the expected number of tokens."""
_LARGE_FLOAT32 = 1 << 20
"""Float32 weights with fewer numbers stay with MKL. Passes of the embedded target, with weights packed (from
two tokens on), by output, and by input, one thread of a Xeon, in ms: one token 2.92, 2.55, 2.49; 5 tokens
6.4, 4.6, 4.3; 17 tokens 7.1, 6.2, 5.0; sixteen sequences 9.2, 8.5, 7.8; with AVX2 alone 3.14, 2.72, 2.63;
6.7, 5.6, 5.2; 9.3, 8.1, 7.5; 12.5, 11.1, 10.6. Five tokens times 1,024 x 4,096 numbers take 1.2, 1.6, 1.4."""
_LEAST_COPIED = 1 << 16
"""Where MKL is slow, weights with fewer numbers have no packed copy: on an AMD EPYC, of 256 x 256 numbers, 5
tokens take 14 us by output and 13 packed."""
_SLOW = 1.3
"""MKL is, where 64 tokens times a small weight take so many times what they take packed: 0.8 on that Xeon,
1.0 with AVX2 alone. On the EPYC a pass of sixteen sequences with four tokens each took 14.5 ms by MKL, with
weights by output, and 6.9 packed."""


def pack_linears(model: nn.Module, *, copies: bool = True) -> int:
    """Lay out the bfloat16 and float32 linear layers of a model on a CPU, where torch and the CPU support it;
    returns their number. The original of a large weight is freed unless another module shares it.

    Args:
        copies: small ones may have a packed copy, where MKL is slow.
    """
    each_own = (module.parameters(recurse=False) for module in model.modules())
    users = Counter(map(id, chain.from_iterable(each_own)))
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    # Some have no weight yet: compressed-tensors makes it in the first pass.
    chosen = [each for each in linears if hasattr(each, "weight") and _fits(each.weight)]
    for linear in chosen:
        is_shared = users[id(linear.weight)] > 1
        if _is_large(linear.weight):
            _pack(linear, is_shared=is_shared)
        elif not is_shared:
            _lay_out_by_input(linear, copies=copies)
    return len(chosen)


@functools.cache
def _is_mkl_slow() -> bool:
    tokens, weight = torch.ones(_TYPICAL_TOKENS, 256), torch.ones(256, 704)
    if not can_pack_weights(weight.dtype):
        return False
    packed = pack_weight(weight.t().contiguous(), _TYPICAL_TOKENS)
    ways = (lambda: torch.mm(tokens, weight)), (lambda: packed_linear(tokens, packed, None))
    by_mkl, by_onednn = (min(timeit.repeat(way, number=3, repeat=7)) for way in ways)
    return by_mkl > _SLOW * by_onednn


def _fits(weight: Tensor) -> bool:
    # Quantised weights may report another dtype: a subclass of Tensor holds them.
    if type(weight.data) is not Tensor or weight.device.type != "cpu":
        return False
    if _is_large(weight):
        return can_pack_weights(weight.dtype)
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def _is_large(weight: Tensor) -> bool:
    return weight.dtype != torch.float32 or weight.numel() >= _LARGE_FLOAT32


def _lay_out_by_input(linear: nn.Linear, *, copies: bool) -> None:
    weight = linear.weight
    weight.data = weight.detach().t().contiguous().t()
    by_input = weight.detach().t()
    num_inputs, num_outputs = by_input.shape  # of this rank
    is_copied = copies and weight.numel() >= _LEAST_COPIED and _is_mkl_slow()
    packed = pack_weight(by_input.t().contiguous(), _TYPICAL_TOKENS) if is_copied else None

    def forward(self: nn.Linear, tokens: Tensor) -> Tensor:
        if packed is not None and tokens.numel() > num_inputs:
            return packed_linear(tokens, packed, self.bias)
        flat = tokens if tokens.dim() == 2 else tokens.reshape(-1, num_inputs)
        product = torch.mm(flat, by_input) if self.bias is None else torch.addmm(self.bias, flat, by_input)
        return product if tokens.dim() == 2 else product.view(*tokens.shape[:-1], num_outputs)

    linear.forward = forward.__get__(linear)  # type: ignore[method-assign]


def _pack(linear: nn.Linear, *, is_shared: bool) -> None:
    weight = linear.weight.detach()
    packed = pack_weight(weight, _TYPICAL_TOKENS)

    def forward(self: nn.Linear, tokens: Tensor) -> Tensor:
        return packed_linear(tokens, packed, self.bias)  # a rank takes the bias away, to add it once

    linear.forward = forward.__get__(linear)  # type: ignore[method-assign]
    if not is_shared:  # models read shape and dtype; keep these without the memory
        hollow = weight.new_empty(1).expand(weight.shape)
        linear.weight = nn.Parameter(hollow, requires_grad=False)
