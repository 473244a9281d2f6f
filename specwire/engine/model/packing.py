"""Packs weights of linear layers into the order in which a CPU's matrix kernels read them.

`torch.nn.functional.linear` reorders a bfloat16 weight in every call, which costs as much as the product
itself when few tokens are run. Here it is done once, with the operators that torch's own compiler uses when
it freezes a model for inference; the products are the same, bit for bit.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from specwire.engine.private import can_pack_weights, pack_weight, packed_linear

_TYPICAL_TOKENS = 64
"""The kernels choose the order by the expected number of tokens."""


def pack_linears(model: nn.Module) -> int:
    """Pack the bfloat16 linear layers of a model on a CPU, where torch and the CPU support it.

    The original weight is freed unless another module shares it.

    Returns:
        The number of packed layers.
    """
    if not can_pack_weights():
        return 0
    users = Counter(id(parameter) for parameter in _all_parameters(model))
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    chosen = [linear for linear in linears if _fits(linear.weight)]
    for linear in chosen:
        _pack(linear, is_shared=users[id(linear.weight)] > 1)
    return len(chosen)


def _all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of each module; shared ones occur once for each module."""
    return [p for module in model.modules() for p in module.parameters(recurse=False)]


def _fits(weight: Tensor) -> bool:
    # Quantised weights may report bfloat16 as their dtype: a subclass of Tensor holds them.
    is_plain = type(weight.data) is Tensor
    return is_plain and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _pack(linear: nn.Linear, *, is_shared: bool) -> None:
    weight = linear.weight.detach()
    packed = pack_weight(weight, _TYPICAL_TOKENS)

    def forward(tokens: Tensor) -> Tensor:
        return packed_linear(tokens, packed, linear.bias)  # which a rank takes away, to add it once

    linear.forward = forward  # type: ignore[method-assign, assignment]
    if not is_shared:  # models read shape and dtype; keep these without the memory
        hollow = weight.new_empty(1).expand(weight.shape)
        linear.weight = nn.Parameter(hollow, requires_grad=False)
