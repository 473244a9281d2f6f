"""Layers that torch's compiler has fused: on CUDA most kernels of a short pass are pointwise and tiny.

Attention keeps its own kernels: the compiler does not look into it, and a layer becomes what is before it and
what is after it. Sizes are symbolic, and layers of a kind share what was compiled, so it is done once for one
token and once for more.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from specwire.engine.attention import paged as attention
from specwire.engine.layers.blocks import layer_of

_NUM_COMPILERS = 8
"""Processes that compile some twenty kernels, each of which takes about a second."""


class CompiledLayers:
    """The layers of a model that contain its attention modules, compiled from now on.

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
