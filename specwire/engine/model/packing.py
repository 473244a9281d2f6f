"""Weights of linear layers in the order in which a CPU's matrix kernels read them.

`torch.nn.functional.linear` brings a bfloat16 weight into that order anew in every call, which costs as much
as the product itself when few tokens are run. Here it is done once, with the operators that torch's own
compiler uses when it freezes a model for inference; the products are the same, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

_TYPICAL_TOKENS = 64
"""The kernels choose the order by the number of tokens that they are told to expect."""


def pack_linears(model: nn.Module) -> int:
    """Pack the bfloat16 linear layers of a model on a CPU, where torch and it can; others are left alone.

    A weight that no other module shares is freed: then the packed one is all there is.

    Returns:
        How many layers were packed.
    """
    if not can_pack():
        return 0
    users = Counter(id(parameter) for parameter in _all_parameters(model))
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    chosen = [linear for linear in linears if _fits(linear.weight)]
    for linear in chosen:
        _pack(linear, is_shared=users[id(linear.weight)] > 1)
    return len(chosen)


def can_pack() -> bool:
    """Whether this torch has the operators, and this processor what their bfloat16 kernels are made of."""
    operators: Any = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has_kernels: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_operators: bool = all(hasattr(operators, name) for name in names)
    return has_kernels and has_operators and operators._is_mkldnn_bf16_supported()


def _all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Of each module, shared ones as often as they are used."""
    return [p for module in model.modules() for p in module.parameters(recurse=False)]


def _fits(weight: Tensor) -> bool:
    # Weights of a quantised checkpoint may pose as bfloat16: a subclass says how they are stored.
    is_plain = type(weight.data) is Tensor
    return is_plain and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _pack(linear: nn.Linear, *, is_shared: bool) -> None:
    operators: Any = torch.ops.mkldnn
    weight, bias = linear.weight.detach(), linear.bias
    packed = operators._reorder_linear_weight(weight, _TYPICAL_TOKENS)

    def forward(tokens: Tensor) -> Tensor:
        output: Tensor = operators._linear_pointwise(tokens, packed, bias, "none", [], "")
        return output

    linear.forward = forward  # type: ignore[method-assign, assignment]
    if not is_shared:  # keep shape and dtype, which models ask for, without the memory
        hollow = weight.new_empty(1).expand(weight.shape)
        linear.weight = nn.Parameter(hollow, requires_grad=False)
