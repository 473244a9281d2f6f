"""A rank's shard of a model: loaded by transformers' own tensor parallel plan, run on plain tensors.

transformers shards the parameters as DTensors while it reads them, so that a rank reads only its shard.
DTensors cost Python time in every call. So once they are loaded, the layers whose style is supported here run
on the local shards, with the same collectives: one all-reduce after each row-wise layer and after the
embedding, one all-gather of the logits. Layers of any other style are left to transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from specwire.engine.model import loading
from specwire.engine.model.packing import pack_linears
from specwire.errors import ModelLoadError

_COLUMNS = "colwise"
_GATHERED = ("colwise_gather_output", "colwise_rep")
_ROWS = "rowwise"
_EMBEDDING = "embedding_rowwise"

Forward = Callable[[Tensor], Tensor]


def load_shard(source: str, *, dtype: str, num_ranks: int) -> tuple[Any, dict[str, Any]]:
    """Load this rank's shard; torch.distributed must be initialised with `num_ranks` ranks.

    Returns:
        The model with the engine's attention, checked, and `loading.describe` of the whole model.

    Raises:
        ModelLoadError: naming the source and the reason.
    """
    from transformers.distributed import DistributedConfig

    with loading.errors_naming(source):
        config = loading.read_config(source)
        check_shardable(config, num_ranks)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        distributed = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
        model = loading.load_weights(
            source, loading.weights_dtype(config, dtype, device), distributed_config=distributed
        )
        description = loading.describe(model, source)
        run_on_local_shards(model)
        loading.self_check(model)
    return model, description


def check_shardable(config: Any, num_ranks: int) -> None:
    """Refuse a model by its config if it cannot be sharded over `num_ranks` ranks.

    Raises:
        ModelLoadError: naming the field and the value.
    """
    if loading.is_quantised(config):
        raise ModelLoadError("quantised weights cannot be spread over ranks")
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelLoadError(f"{text.model_type!r} has no tensor parallel plan in transformers")
    for name in ("num_attention_heads", "num_key_value_heads"):
        num_heads = getattr(text, name, None)
        if num_heads is not None and num_heads % num_ranks:
            raise ModelLoadError(f"{name}={num_heads} cannot be shared evenly by {num_ranks} ranks")


def run_on_local_shards(model: Any) -> None:
    """Replace DTensors by their local shards, in every layer whose style is supported here."""
    plan: dict[str, str] = model.tp_plan
    shards: dict[int, nn.Parameter] = {}
    wrappers: list[tuple[nn.Module, Callable[[nn.Module, Forward], Forward]]] = []
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        wrap = _wrapper(module, style)
        if wrap is not None and isinstance(module.weight, DTensor):
            _note_first_row(module)
            _unwrap(module, shards)
            wrappers.append((module, wrap))
    pack_linears(model)  # first, since it replaces `forward` by the bare product
    for module, wrap in wrappers:
        module.forward = wrap(module, module.forward)


def _wrapper(module: nn.Module, style: str | None) -> Callable[[nn.Module, Forward], Forward] | None:
    """Adds the collective to a layer's own forward; None for layers that are left to transformers."""
    if isinstance(module, nn.Embedding):
        return _summed_embedding if style == _EMBEDDING else None
    if not isinstance(module, nn.Linear):
        return None
    if style == _COLUMNS:
        return _unchanged
    if style in _GATHERED:
        return _gathered
    return _summed if style == _ROWS else None


def _unwrap(module: nn.Module, shards: dict[int, nn.Parameter]) -> None:
    """Set local parameters and restore the class's own forward; tied parameters stay tied."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            key = id(parameter)
            if key not in shards:
                shards[key] = nn.Parameter(parameter.to_local(), requires_grad=False)
            setattr(module, name, shards[key])
    module.__dict__.pop("forward", None)


def _note_first_row(module: nn.Module) -> None:
    """Note at which row of the whole embedding the shard starts; only the DTensor knows its size."""
    if isinstance(module, nn.Embedding):
        num_rows = module.weight.shape[0]
        size = -(-num_rows // dist.get_world_size())
        module.first_row = min(dist.get_rank() * size, num_rows)  # type: ignore[assignment]


def _unchanged(module: nn.Module, product: Forward) -> Forward:
    """Column-wise: every rank uses its own columns."""
    return product


def _summed(module: nn.Module, product: Forward) -> Forward:
    """Row-wise: partial products are summed; the bias, which every rank has, is added once."""
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    module.bias = None  # type: ignore[assignment]

    def forward(tokens: Tensor) -> Tensor:
        output = product(tokens)
        dist.all_reduce(output)
        return output if bias is None else output + bias

    return forward


def _gathered(module: nn.Module, product: Forward) -> Forward:
    """Column-wise, gathered on all ranks. Shards are equally wide except the last ones."""
    width: int = module.out_features  # type: ignore[assignment]
    num_ranks = dist.get_world_size()
    share = -(-width // num_ranks)

    def forward(tokens: Tensor) -> Tensor:
        own = product(tokens)
        padded = nn.functional.pad(own, (0, share - own.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(num_ranks)]
        dist.all_gather(parts, padded)
        return torch.cat(parts, dim=-1)[..., :width]

    return forward


def _summed_embedding(module: nn.Module, lookup: Forward) -> Forward:
    """Row-wise embedding: the rank that has a token looks it up, the others contribute zeros."""
    first: int = module.first_row  # type: ignore[assignment]
    num_rows = module.weight.shape[0]  # type: ignore[index]

    def forward(token_ids: Tensor) -> Tensor:
        rows = token_ids - first
        elsewhere = (rows < 0) | (rows >= num_rows)
        output = lookup(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        dist.all_reduce(output)
        return output

    return forward
