"""A rank's share of a quantised model: each weight is cut when transformers has read it and put it together.

transformers shards what it reads before a quantiser sees it. It cuts each of a weight's parts like the whole,
scales that all columns share too, and DTensor has no view of torchao's tensors. So a rank reads quantised
weights as a single process does, one at a time, and keeps its rows or columns of each. Where a quantiser
leaves plain numbers (8-bit floats on a CPU, compressed-tensors) it is these that are cut.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import core_model_loading

from specwire.engine.model import loading
from specwire.errors import ModelLoadError

COLUMNS = "colwise"
GATHERED = ("colwise_gather_output", "colwise_rep")
ROWS = "rowwise"
EMBEDDING = "embedding_rowwise"
CUT = (COLUMNS, *GATHERED, ROWS, EMBEDDING)
WHOLE = ("replicate", "replicated_with_grad_allreduce")
_READS_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
_SCALES = "weight_scale_inv"
"""Of transformers' layers of 8-bit floats: one number for each block of a weight, or for all of it."""
_TORCHAO = ("Float8Tensor", "Int8Tensor")
"""Tensors that cut their scales with their numbers."""


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """How a plan, with `*` for the numbers of layers, spreads a module over ranks; None where it does not."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def load_cut(
    source: str, config: Any, *, dtype: str, device: str, rank: int, num_ranks: int
) -> tuple[Any, dict[str, Any]]:
    """Load this rank's share of a quantised model.

    Args:
        config: of the model, checked.
        dtype: as of `loading.load_model`.

    Returns:
        The model in eval mode, with parameters smaller than its layers say, and `loading.describe` of the
        whole one.

    Raises:
        ModelLoadError: naming the method, and a weight that cannot be cut.
    """
    if config.quantization_config.get("quant_method") == "compressed-tensors":
        # Else they are decompressed in the first pass, of a layer whose shape is that of the whole one.
        config.quantization_config |= {"dequantize": True}
    cutter = Cutter(rank, num_ranks)
    with loading.naming_method(config), cutter.cutting():
        model = loading.load_weights(source, dtype, config=config, **loading.placement(config, device))
    description = loading.describe(model, source)
    sizes = cutter.whole_sizes
    description["num_parameters"] = sum(sizes.get(id(each), each.numel()) for each in model.parameters())
    return model, description


class Cutter:
    """Cuts the parameters of one model while it is read."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self.whole_sizes: dict[int, int] = {}  # numbers of all ranks together, by the parameter's identity

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """In the body, transformers keeps the share of each weight that it has read. Weights are read when it
        is their turn: read ahead, as is usual, all of them would be in memory."""
        set_whole, before = core_model_loading.set_param_for_module, os.environ.get(_READS_IN_TURN)

        def set_share(model: Any, target_name: str, *args: Any, **keywords: Any) -> None:
            set_whole(model, target_name, *args, **keywords)
            self.cut(model, target_name)

        core_model_loading.set_param_for_module = set_share
        os.environ[_READS_IN_TURN] = "1"
        try:
            yield
        finally:
            core_model_loading.set_param_for_module = set_whole
            if before is None:
                del os.environ[_READS_IN_TURN]
            else:
                os.environ[_READS_IN_TURN] = before

    def cut(self, model: Any, name: str) -> None:
        """Replace a parameter by this rank's share."""
        module_name, _, own_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        style = style_of(module_name, model.tp_plan)
        whole = dict(module.named_parameters(recurse=False)).get(own_name)
        if style not in CUT or whole is None:
            return
        if (dim := self._dim(name, module, style, whole)) is None:
            return
        num = whole.shape[dim]
        width = -(-num // self._num_ranks)  # as DTensor does: the last ranks may have less
        start, end = (min(rank * width, num) for rank in (self._rank, self._rank + 1))
        share = whole.detach()[start:end] if dim == 0 else whole.detach()[:, start:end]
        parameter = nn.Parameter(share.contiguous().clone(), requires_grad=False)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # else it would be drawn at random
        self.whole_sizes[id(parameter)] = whole.numel()
        setattr(module, own_name, parameter)

    def _dim(self, name: str, module: Any, style: str | None, whole: Tensor) -> int | None:
        """The dimension along which a parameter is cut; None where each rank has all of it."""
        own_name, dim = name.rpartition(".")[2], 1 if style == ROWS else 0
        is_plain = type(whole.detach()) is Tensor
        if own_name == "bias":
            return 0 if dim == 0 else None
        if own_name == "weight" and (is_plain or type(whole).__name__ in _TORCHAO):
            return dim
        if own_name == _SCALES and whole.ndim == 2:
            _check_blocks(name, module, dim, self._num_ranks)
            return dim
        if own_name in (_SCALES, "activation_scale") and whole.numel() == 1:
            if dim == 1 and module.activation_scheme == "dynamic":
                raise ModelLoadError(f"{name}: activations are quantised by all inputs of a layer")
            return None
        raise ModelLoadError(
            f"{name}: ranks cannot have shares of {type(whole).__name__} of {list(whole.shape)}"
        )


def _check_blocks(name: str, module: Any, dim: int, num_ranks: int) -> None:
    """Refuse scales of blocks some of which would lie on two ranks."""
    size, what = ((module.out_features, "rows"), (module.in_features, "columns"))[dim]
    block = module.block_size[dim]
    if size % (block * num_ranks):
        raise ModelLoadError(
            f"{name}: {size} {what} in blocks of {block} cannot be shared evenly by {num_ranks} ranks"
        )
