"""A rank's shard of a model: loaded by transformers' own tensor parallel plan, run on plain tensors.

transformers shards the parameters as DTensors while it reads them, so that a rank reads only its shard.
DTensors cost Python time in every call. So once they are loaded, the layers whose style is supported here run
on the local shards, with the same collectives: one all-reduce after each row-wise layer and after the
embedding, one all-gather of the logits. Layers of any other style are left to transformers. Quantised
weights are cut when they are read (`quantised.py`), and run likewise.

An all-reduce over more than two ranks adds a number's parts in an order that depends on where in the tensor
it is, and so on the tokens beside it, even if all passes have one size. Where a token is to be bitwise the
same in any company, all ranks gather the parts instead, and add them in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from specwire.config import extras
from specwire.engine.group import quantised
from specwire.engine.group.quantised import COLUMNS, EMBEDDING, GATHERED, ROWS
from specwire.engine.model import loading
from specwire.engine.model.packing import pack_linears
from specwire.errors import ModelLoadError

Forward = Callable[[Tensor], Tensor]
Wrap = Callable[[nn.Module, Forward], Forward]


def load_shard(
    source: str, *, dtype: str, num_ranks: int, in_rank_order: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Load this rank's shard; torch.distributed must be initialised with `num_ranks` ranks.

    Args:
        in_rank_order: add what the ranks have computed in the order of the ranks.

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
        if loading.is_quantised(config):
            ranks = {"rank": dist.get_rank(), "num_ranks": num_ranks}
            model, description = quantised.load_cut(source, config, dtype=dtype, device=device, **ranks)
        else:
            distributed = DistributedConfig(tp_plan="auto", tp_size=num_ranks)
            model = loading.load_weights(
                source, loading.weights_dtype(config, dtype, device), distributed_config=distributed
            )
            description = loading.describe(model, source)
        run_on_local_shards(model, in_rank_order=in_rank_order)
        loading.self_check(model)
    return model, description


def check_shardable(config: Any, num_ranks: int) -> None:
    """Refuse a model that cannot be sharded over so many ranks: a ModelLoadError names the field and the
    value."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelLoadError(f"{text.model_type!r} has no tensor parallel plan in transformers")
    if loading.is_quantised(config):
        if reason := extras.unshared_reason(config.quantization_config):
            raise ModelLoadError(reason)
        for name, style in text.base_model_tp_plan.items():
            if style not in (*quantised.CUT, *quantised.WHOLE):
                raise ModelLoadError(
                    f"quantised weights are cut by rows or columns alone, and {name} is {style!r}"
                )
    for name in ("num_attention_heads", "num_key_value_heads"):
        num_heads = getattr(text, name, None)
        if num_heads is not None and num_heads % num_ranks:
            raise ModelLoadError(f"{name}={num_heads} cannot be shared evenly by {num_ranks} ranks")


def run_on_local_shards(model: Any, *, in_rank_order: bool = False) -> None:
    """Replace DTensors by their local shards, in every layer whose style is supported here.

    Raises:
        ModelLoadError: sums are to be in the order of the ranks, and transformers makes some of them.
    """
    plan: dict[str, str] = model.tp_plan
    total = sum_in_rank_order if in_rank_order else _all_reduced
    shards: dict[int, nn.Parameter] = {}
    wrappers: list[tuple[nn.Module, Wrap]] = []
    for name, module in model.named_modules():
        style = quantised.style_of(name, plan)
        wrap = _wrapper(module, style, total)
        if wrap is not None and _is_spread(module):
            if isinstance(module, nn.Embedding):  # the row of the whole one at which the shard starts
                num_rows = module.num_embeddings
                size = -(-num_rows // dist.get_world_size())
                module.first_row = min(dist.get_rank() * size, num_rows)  # type: ignore[assignment]
            _unwrap(module, shards)
            wrappers.append((module, wrap))
    for name, weight in model.named_parameters() if in_rank_order else ():
        if isinstance(weight, DTensor):
            raise ModelLoadError(
                f"--batch-invariant: {name} is spread over ranks by transformers, which adds in its own order"
            )
    # First, since it replaces `forward` by the bare product. No rank holds more than its share.
    pack_linears(model, copies=False)
    for module, wrap in wrappers:
        module.forward = wrap(module, module.forward)


def _wrapper(module: nn.Module, style: str | None, total: Forward) -> Wrap | None:
    """Adds the collective to a layer's own forward, with sums over ranks by `total`; None for layers that are
    left to transformers."""
    if isinstance(module, nn.Embedding):
        return _summed_embedding if style == EMBEDDING else None
    if not isinstance(module, nn.Linear):
        return None
    if style == COLUMNS:
        return lambda _, product: product  # every rank uses its own columns
    if style in GATHERED:
        return _gathered
    return partial(_summed, total=total) if style == ROWS else None


def _is_spread(module: Any) -> bool:
    """Whether its weight is a shard: a DTensor, or smaller than the layer."""
    is_table = isinstance(module, nn.Embedding)
    names = ("num_embeddings", "embedding_dim") if is_table else ("out_features", "in_features")
    shape = tuple(getattr(module, name) for name in names)
    return isinstance(module.weight, DTensor) or tuple(module.weight.shape) != shape


def _unwrap(module: nn.Module, shards: dict[int, nn.Parameter]) -> None:
    """Set local parameters and restore the class's own forward; tied parameters stay tied."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            key = id(parameter)
            if key not in shards:
                shards[key] = nn.Parameter(parameter.to_local(), requires_grad=False)
            setattr(module, name, shards[key])
    module.__dict__.pop("forward", None)


def _all_reduced(part: Tensor) -> Tensor:
    dist.all_reduce(part)
    return part


def sum_in_rank_order(part: Tensor) -> Tensor:
    """The sum over ranks, (rank 0 + rank 1) + rank 2 and so on, wherever in the tensor a number is.

    Gathering copies and computes nothing, so no algorithm, protocol or number of channels has a part in it.
    """
    total, *others = _all_gathered(part)
    for other in others:
        total = total + other
    return total


def _all_gathered(part: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return parts


def _summed(module: nn.Module, product: Forward, *, total: Forward) -> Forward:
    """Row-wise: partial products are summed; the bias, which every rank has, is added once."""
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    module.bias = None  # type: ignore[assignment]

    def forward(tokens: Tensor) -> Tensor:
        output = total(product(tokens))
        return output if bias is None else output + bias

    return forward


def _gathered(module: nn.Module, product: Forward) -> Forward:
    """Column-wise, gathered on all ranks. Shards are equally wide except the last ones."""
    width: int = module.out_features  # type: ignore[assignment]
    share = -(-width // dist.get_world_size())

    def forward(tokens: Tensor) -> Tensor:
        own = product(tokens)
        padded = nn.functional.pad(own, (0, share - own.shape[-1])).contiguous()
        return torch.cat(_all_gathered(padded), dim=-1)[..., :width]

    return forward


def _summed_embedding(module: nn.Module, lookup: Forward) -> Forward:
    """Row-wise embedding: the rank that has a token looks it up, the others contribute zeros, whose order is
    of no matter. Drafters read rows without what a model's own class does to them: `bare_rows`."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    first: int = module.first_row  # type: ignore[assignment]

    def summed(look_up: Forward, token_ids: Tensor) -> Tensor:
        rows = token_ids - first
        elsewhere = (rows < 0) | (rows >= len(weight))
        output = look_up(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        dist.all_reduce(output)
        return output

    bare_rows = partial(nn.functional.embedding, weight=weight)
    module.bare_rows = partial(summed, bare_rows)  # type: ignore[assignment]
    return partial(summed, lookup)
