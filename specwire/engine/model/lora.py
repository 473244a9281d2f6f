"""LoRA adapters beside a model (Hu et al. 2021, arXiv:2106.09685), chosen by each sequence of a pass.

    y = x W^T + (x A^T * share) B^T

A linear layer holds the matrices of all adapters side by side. The share of a token is the scaling of its
adapter in the columns of that adapter, and 0 in all others:

    A [sum of ranks, in]    | adapter 1 | adapter 2 | ...
    B [out, sum of ranks]   | adapter 1 | adapter 2 | ...
    share of a token        | 0  0  0   | s  s      | 0      of adapter 2

So the work of a pass has one shape, whichever adapters its sequences have: the company in the batch changes
nothing, a padded step can be captured, and to a token without an adapter zeros are added. A pass in which no
sequence has an adapter runs the layers as they are.

The files are those of peft's `save_pretrained`; what a config may say beyond low ranks is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specwire.config.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from specwire.errors import ModelLoadError, UnsupportedError

_READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "peft_type", "bias"}
    | {"init_lora_weights"}
)
_WITHOUT_EFFECT = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode"}
    | {"exclude_modules", "layers_to_transform", "layers_pattern"}  # the tensors show which layers these left
    | {"lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"}  # of training
    | {"fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"}
)
_OWN_BASE = frozenset({"pissa", "olora", "corda", "loftq", "lora_ga"})
"""Ways to begin a training that change the base, to which such an adapter is not an addition."""
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class Factors(NamedTuple):
    """What an adapter adds to a layer: A, [rank, in], and B, [out, rank], and the scaling of their
    product."""

    down: Tensor
    up: Tensor
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """An adapter as it is stored: the name that requests have, and factors by the path of the layer."""

    name: str
    factors: Mapping[str, Factors]


def read(name: str, directory: Path) -> Adapter:
    """The adapter in a directory that peft has written.

    Raises:
        ModelLoadError: naming the file that is not there, or the field or tensor that is not served.
    """
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (directory / file).is_file():
            raise ModelLoadError(f"no {file} in this directory")
    config = json.loads((directory / ADAPTER_CONFIG).read_text())
    _check_config(config)
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in load_file(directory / ADAPTER_WEIGHTS).items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ModelLoadError(f"tensor {key}: is no lora_A or lora_B of a linear layer")
        parts[match[1]][match[2]] = tensor
    if not parts:
        raise ModelLoadError(f"{ADAPTER_WEIGHTS} has no tensors")
    return Adapter(name, {path: _factors(path, pair, config) for path, pair in parts.items()})


def _check_config(config: Mapping[str, Any]) -> None:
    """A ModelLoadError names the first field with a value that is not served."""
    start = config.get("init_lora_weights", True)
    refused = {
        "peft_type": config.get("peft_type") != "LORA",
        "bias": config.get("bias", "none") != "none",
        "init_lora_weights": isinstance(start, str) and any(map(start.lower().startswith, _OWN_BASE)),
        "target_modules": not config.get("target_modules"),
    }
    refused |= {name: bool(config[name]) for name in config if name not in _READ | _WITHOUT_EFFECT}
    for name, is_refused in refused.items():
        if is_refused:
            raise ModelLoadError(f"{ADAPTER_CONFIG}: {name}={config.get(name)!r} is not served")


def _factors(path: str, pair: Mapping[str, Tensor], config: Mapping[str, Any]) -> Factors:
    """Those of a layer, scaled as peft does; a ModelLoadError where tensors and config do not fit."""
    targets = config["target_modules"]
    if isinstance(targets, str):
        is_named = targets == "all-linear" or re.fullmatch(targets, path) is not None
    else:
        is_named = any(f".{path}".endswith(f".{target}") for target in targets)
    if not is_named:
        raise ModelLoadError(f"{path}: has tensors, and is not among target_modules={targets!r}")
    if pair.keys() != {"A", "B"}:
        raise ModelLoadError(f"{path}: has lora_{min(pair)} alone")
    rank = _by_pattern(config.get("rank_pattern"), path, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), path, config["lora_alpha"])
    found = pair["A"].shape[0], pair["B"].shape[-1]
    if found != (rank, rank):
        raise ModelLoadError(f"{path}: has ranks {found} in its tensors, and {rank} in {ADAPTER_CONFIG}")
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Factors(pair["A"], pair["B"], scaling)


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, usual: Any) -> Any:
    """The value of the first pattern that matches the end of a path, from a dot on, as peft finds it."""
    matching = (key for key in patterns or () if re.match(rf"(.*\.)?({key})$", path))
    return (patterns or {}).get(next(matching, ""), usual)


def attach(model: Any, adapters: Sequence[Adapter]) -> None:
    """Let a model's linear layers, packed or not, add what adapters have for them, in passes that are
    `running` with some. Sequences name adapters by their place here, counted from 1.

    Raises:
        ModelLoadError: naming the adapter and a layer that the model does not have, or that takes none.
    """
    layers, head = dict(model.named_modules()), model.get_output_embeddings()
    by_layer: dict[str, list[tuple[int, Factors]]] = defaultdict(list)
    for number, adapter in enumerate(adapters, 1):
        for path, factors in adapter.factors.items():
            if problem := _problem(layers.get(path), head, factors):
                raise ModelLoadError(f"adapter {adapter.name}: {path}: {problem}")
            by_layer[path].append((number, factors))
    for path, parts in by_layer.items():
        layers[path].forward = _Adapted(path, layers[path], parts, len(adapters))


def _problem(layer: nn.Module | None, head: nn.Module | None, factors: Factors) -> str:
    """Why a layer cannot be adapted; empty if it can."""
    if layer is None:
        return "is not in this model"
    if layer is head:  # it runs the wanted rows alone, not all tokens of a pass
        return "is the output embedding, which is not adapted"
    if isinstance(layer, Conv1D):
        sizes = layer.nf, layer.nx
    elif isinstance(layer, nn.Linear):
        sizes = layer.out_features, layer.in_features
    else:
        return f"is of type {type(layer).__name__}, and no linear layer"
    given = factors.up.shape[0], factors.down.shape[1]
    return f"is of size {sizes}, and what the adapter adds of {given}" if sizes != given else ""


def num_adapters(model: Any) -> int:
    """How many adapters are attached to a model."""
    forwards = (layer.__dict__.get("forward") for layer in model.modules())
    return max((each.num_adapters for each in forwards if isinstance(each, _Adapted)), default=0)


class _Adapted:
    """The forward of a linear layer with adapters."""

    def __init__(
        self, path: str, layer: nn.Module, parts: Sequence[tuple[int, Factors]], num_adapters: int
    ) -> None:
        """`parts` are the number of each adapter that has the layer, and what it adds."""
        weight: Tensor = layer.weight  # type: ignore[assignment]
        self._path, self.num_adapters = path, num_adapters
        self._own: Callable[[Tensor], Tensor] = layer.forward
        self._down = torch.cat([each.down for _, each in parts]).to(weight.device, weight.dtype)
        up = torch.cat([each.up for _, each in parts], dim=1).to(weight.device, weight.dtype)
        self._up = up.T.contiguous()
        self._shares = self._down.new_zeros(num_adapters + 1, len(self._down))
        start = 0
        for number, each in parts:
            end = start + len(each.down)
            self._shares[number, start:end] = each.scaling
            start = end

    def __call__(self, inputs: Tensor) -> Tensor:
        """`inputs` are [..., in] of all tokens of a pass."""
        output = self._own(inputs)
        numbers = _running.get()
        if numbers is None:
            return output
        rows = inputs.reshape(-1, inputs.shape[-1])
        if len(rows) != len(numbers):
            problem = f"runs {len(rows)} rows in a pass of {len(numbers)} tokens: whose they are is not known"
            raise UnsupportedError("adapter", self._path, problem)
        low = nn.functional.linear(rows, self._down) * self._shares.index_select(0, numbers)
        return torch.addmm(output.reshape(len(rows), -1), low, self._up).view(output.shape)


_running: ContextVar[Tensor | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def running(numbers: Tensor | None) -> Iterator[None]:
    """Passes in this thread have tokens of these adapters: int64 [num_tokens], the adapter of each token, 0
    for none; None if no token has one."""
    token = _running.set(numbers)
    try:
        yield
    finally:
        _running.reset(token)
