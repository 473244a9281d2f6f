"""The attention and MLP blocks of a model, and passes that leave some of them out.

    hidden ──┬─▶ norm ─▶ attention ─▶ + ──┬─▶ norm ─▶ MLP ─▶ + ──▶        a block that is left out adds zero
             └────────────────────────┘   └──────────────────┘

Found by structure, as attention layers are: a layer has one child that attends, and one other with matrices.
Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) calls this self-speculative decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specwire.config.blocks import ATTENTION, MLP, Block, skip_text
from specwire.engine.attention.probe import Probe
from specwire.errors import ModelLoadError


class _Part(NamedTuple):
    """A block's module, and how many results it returns; 0 for a tensor alone."""

    module: nn.Module
    num_results: int


class Blocks:
    """Some blocks of a model, which passes within `skipped` leave out.

    Args:
        parts: of the whole model.
        num_read: bytes that a pass of the whole model reads.

    Attributes:
        blocks: those that are left out.
        share_read: of the weights that a pass reads, the share that is left.
    """

    def __init__(self, parts: Mapping[Block, _Part], blocks: Iterable[Block], num_read: int) -> None:
        self.blocks = tuple(sorted(blocks))
        self._parts = [parts[block] for block in self.blocks]
        num_left_out = sum(_num_bytes(part.module) for part in self._parts)
        self.share_read = 1 - num_left_out / max(1, num_read)

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Passes of the model in the body leave the blocks out; one thread at a time."""
        before = [part.module.__dict__.get("forward") for part in self._parts]
        try:
            for part in self._parts:
                part.module.forward = _nothing(part.num_results)
            yield
        finally:
            for part, forward in zip(self._parts, before, strict=True):
                if forward is None:
                    part.module.__dict__.pop("forward", None)
                else:
                    part.module.forward = forward


class ModelBlocks:
    """All blocks of a model that has the engine's attention.

    Raises:
        ModelLoadError: its layers are not made of blocks of their own.
    """

    def __init__(self, model: Any) -> None:
        layers, num_results = _layers(model)
        modules = {
            Block(number, kind): module
            for number, layer in enumerate(layers)
            for kind, module in zip((ATTENTION, MLP), layer, strict=True)
        }
        users: dict[int, Block] = {}
        for block, module in modules.items():
            for weight in module.parameters():
                other = users.setdefault(id(weight), block)
                if other != block:  # leaving out one would not spare it
                    raise ModelLoadError(f"blocks {other} and {block} share weights")
        self._parts = {
            block: _Part(each, num_results[each]) for block, each in modules.items() if each in num_results
        }
        output = model.get_output_embeddings()
        self._num_read = sum(map(_num_bytes, modules.values())) + (_num_bytes(output) if output else 0)
        self.num_layers = len(layers)

    def all(self) -> tuple[Block, ...]:
        """Every block, layer by layer."""
        return tuple(sorted(self._parts))

    def without(self, blocks: Sequence[Block]) -> Blocks:
        """The model with some blocks left out; a ModelLoadError if it does not have one of them."""
        unknown = [block for block in blocks if block not in self._parts]
        if unknown:
            most = self.num_layers - 1
            raise ModelLoadError(f"the model has no blocks {skip_text(unknown)}: its layers are 0 to {most}")
        return Blocks(self._parts, blocks, self._num_read)


def _nothing(num_results: int) -> Callable[..., Any]:
    """The forward of a block that is left out."""

    def forward(*args: Any, **keywords: Any) -> Any:
        states = next(each for each in (*args, *keywords.values()) if isinstance(each, Tensor))
        zeros = torch.zeros_like(states)
        return (zeros, *[None] * (num_results - 1)) if num_results else zeros

    return forward


@torch.inference_mode()
def _layers(model: Any) -> tuple[list[tuple[nn.Module, nn.Module]], dict[nn.Module, int]]:
    """The attention and the MLP of each layer, in the order of the passes; and how many results every module
    returns, see `_Part`: in a pass of one token."""
    from specwire.engine.attention.paged import running  # not above: emulated devices need no transformers

    probe, num_results = Probe(), dict[nn.Module, int]()

    def note(module: nn.Module, _: Any, output: Any) -> None:
        num_results[module] = len(output) if isinstance(output, tuple) else 0

    row = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with running(probe):
            model(input_ids=row, position_ids=row, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    names = {module: name for name, module in model.named_modules()}
    found = []
    for attention in probe.shapes:
        layer = layer_of(model, names[attention])
        # Norms have no matrices.
        children = [
            each for each in layer.children() if any(weight.dim() > 1 for weight in each.parameters())
        ]
        attends = [child for child in children if attention in child.modules()]
        others = [child for child in children if child not in attends]
        if len(attends) != 1 or len(others) != 1:
            kind = type(layer).__name__
            raise ModelLoadError(f"{kind} is not made of one attention and one MLP, which could be left out")
        found.append((attends[0], others[0]))
    return found, num_results


def layer_of(model: Any, name: str) -> nn.Module:
    """The element of a list of layers that a module is in."""
    while name:
        above = name.rpartition(".")[0]
        if isinstance(model.get_submodule(above), nn.ModuleList):
            found: nn.Module = model.get_submodule(name)
            return found
        name = above
    raise ModelLoadError("its layers are in no list")


def _num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())
