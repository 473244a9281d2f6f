"""Fewer and larger kernels: torch's compiler fuses a layer's, and queries, keys and values are one product.

On CUDA most kernels of a short pass are pointwise and tiny, and a small matrix is read at a fraction of the
bandwidth.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specwire.engine.attention import paged as attention
from specwire.engine.layers.blocks import layer_of

_NUM_COMPILERS = 8
"""Processes that compile some twenty kernels, each of which takes about a second."""
_NAMES = "q_proj", "k_proj", "v_proj"


class CompiledLayers:
    """The layers of a model that contain its attention modules, compiled from now on.

    Attention keeps its own kernels: the compiler does not look into it, and a layer becomes what is before it
    and what is after it. Sizes are symbolic, and layers of a kind share what was compiled, so it is done once
    for one token and once for more.

    Raises:
        ModelLoadError: its layers are in no list.
    """

    def __init__(self, model: Any, attending: list[nn.Module], backend: str | Any = "inductor") -> None:
        names = {module: name for name, module in model.named_modules()}
        self._layers = [layer_of(model, names[module]) for module in attending]
        attention.hide_from_compiler()
        num = min(_NUM_COMPILERS, os.cpu_count() or 1)
        options = {"compile_threads": num} if backend == "inductor" else None
        for layer in self._layers:
            layer.compile(dynamic=True, backend=backend, options=options)

    def undo(self) -> None:
        """The layers as they were."""
        for layer in self._layers:
            layer._compiled_call_impl = None


def join_projections(attending: Sequence[nn.Module]) -> int:
    """Compute the projections of attention modules together, where they are plain linear layers.

    Those of a layer with 4,096 states, 64 query and 16 KV heads of 64 take 31 us of an H100 one by one and 21
    together, of 145 for all products of that layer; layers read together at 2.4 TB/s instead of 1.1 to 2.1.

    A weight becomes a part of the one that is read; parameters keep their names, shapes and values. Returns
    the number of modules whose projections were joined.
    """
    found = [[getattr(module, name, None) for name in _NAMES] for module in attending]
    alike = [linears for linears in found if _can_join(linears)]
    for linears in alike:
        _join(linears)
    return len(alike)


def _can_join(linears: Sequence[Any]) -> bool:
    first = linears[0]
    return all(
        type(each) is nn.Linear
        and "forward" not in each.__dict__  # packed, sharded, or with adapters
        and type(each.weight.data) is Tensor
        and (each.in_features, each.weight.dtype, each.bias is None)
        == (first.in_features, first.weight.dtype, first.bias is None)
        for each in linears
    )


def _join(linears: Sequence[Any]) -> None:
    sizes = [each.out_features for each in linears]
    weight = torch.cat([each.weight.detach() for each in linears])
    bias = None if linears[0].bias is None else torch.cat([each.bias.detach() for each in linears])
    for each, part in zip(linears, torch.split(weight, sizes), strict=True):
        each.weight = nn.Parameter(part, requires_grad=each.weight.requires_grad)
    if bias is not None:
        for each, part in zip(linears, torch.split(bias, sizes), strict=True):
            each.bias = nn.Parameter(part, requires_grad=each.bias.requires_grad)
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # by place: the states that were read, and what came of them

    def forward(states: Tensor) -> Tensor:
        first, *others = torch.split(nn.functional.linear(states, weight, bias), sizes, dim=-1)
        kept.update((place, (states, each)) for place, each in enumerate(others))
        return first

    def forward_of(place: int, linear: Any) -> Callable[[Tensor], Tensor]:
        def forward(states: Tensor) -> Tensor:
            read, result = kept.pop(place, (None, None))
            if read is states and result is not None:
                return result
            return nn.functional.linear(states, linear.weight, linear.bias)

        return forward

    linears[0].forward = forward
    for place, each in enumerate(linears[1:]):
        each.forward = forward_of(place, each)
