"""Packs weights of linear layers into the order in which a CPU's matrix kernels read them.

`torch.nn.functional.linear` reorders a bfloat16 weight in every call, which costs as much as the product
itself when few tokens are run; a float32 one it gives to MKL, whose products of few tokens take some times as
long as those of oneDNN. So weights are packed once, with the operators that torch's own compiler uses when it
freezes a model for inference. What bfloat16 products come to is the same, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch
from torch import Tensor, nn

from specwire.engine.private import can_pack_weights, pack_weight, packed_linear

_TYPICAL_TOKENS = 64
"""The kernels choose the order by the expected number of tokens."""
_LEAST_FLOAT32 = 1 << 16
"""Float32 weights with fewer numbers are left alone: a call of oneDNN takes 9 us more than one of MKL, and
products with 256 x 256 take 4 and 13 us for one token, 13 and 14 for 5, ... (one thread of an AMD EPYC)."""
_LARGE_FLOAT32 = 1 << 20
"""With as many numbers, single tokens are as fast packed, too: 512 x 512 takes 15 and 24 us (53 and 25 for 5
tokens), 1,024 x 1,024 takes 51 and 54 (233 and 59), 4,096 x 1,024 takes 228 and 188 (1,177 and 249)."""


def pack_linears(model: nn.Module, *, keeps_none: bool = False) -> int:
    """Pack the bfloat16 and float32 linear layers of a model on a CPU, where torch and the CPU support it;
    returns their number. The original weight is freed unless another module shares it, or single tokens are
    faster with it.

    Args:
        keeps_none: leave those alone of which both would be kept.
    """
    each_own = (module.parameters(recurse=False) for module in model.modules())
    users = Counter(map(id, chain.from_iterable(each_own)))
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    # Some have no weight yet: compressed-tensors makes it in the first pass.
    chosen = [each for each in linears if hasattr(each, "weight") and _fits(each.weight)]
    if keeps_none:
        chosen = [linear for linear in chosen if not _is_kept(linear.weight)]
    for linear in chosen:
        _pack(linear, is_shared=users[id(linear.weight)] > 1)
    return len(chosen)


def _fits(weight: Tensor) -> bool:
    # Quantised weights may report another dtype: a subclass of Tensor holds them.
    if type(weight.data) is not Tensor or weight.device.type != "cpu":
        return False
    is_large = weight.dtype == torch.bfloat16 or weight.numel() >= _LEAST_FLOAT32
    return is_large and can_pack_weights(weight.dtype)


def _is_kept(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.numel() < _LARGE_FLOAT32


def _pack(linear: nn.Linear, *, is_shared: bool) -> None:
    weight, is_kept, num_inputs = linear.weight.detach(), _is_kept(linear.weight), linear.in_features
    packed = pack_weight(weight, _TYPICAL_TOKENS)

    def forward(tokens: Tensor) -> Tensor:
        if is_kept and tokens.numel() == num_inputs:  # one token
            return nn.functional.linear(tokens, linear.weight, linear.bias)
        return packed_linear(tokens, packed, linear.bias)  # a rank takes the bias away, to add it once

    linear.forward = forward  # type: ignore[method-assign, assignment]
    if not is_kept and not is_shared:  # models read shape and dtype; keep these without the memory
        hollow = weight.new_empty(1).expand(weight.shape)
        linear.weight = nn.Parameter(hollow, requires_grad=False)
