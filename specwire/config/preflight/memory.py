"""Whether weights and KV caches fit into the memory that is there, by configs and headers of weights."""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specwire.config import cuda
from specwire.config.cpu import default_dtype
from specwire.config.models import EMBEDDED
from specwire.config.preflight.models import Model, text_config
from specwire.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS_AND_USES = (
    ("memory.max", "memory.current"),  # cgroup v2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # v1
)
_UNLIMITED = 1 << 62
_MEMINFO = Path("/proc/meminfo")
_WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its format."""
_FORMATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "mamba", "mlp", "moe"})
"""Types of layers that keep no keys and values, as files of configs name them."""
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


class _Tensor(NamedTuple):
    dtype: str
    num_values: int
    num_bytes: int


@dataclass(frozen=True)
class _Footprint:
    """What a model takes on a device, as often as it is there.

    Attributes:
        weights, kv_cache: bytes; of the cache 0 if that is not known, or where it takes what is left.
        dtype: format of the weights.
    """

    model: Model
    weights: int
    kv_cache: int
    dtype: str


def check(models: Sequence[Model]) -> None:
    """Refuse what does not fit beside each other, and a file that is cut short. ConfigError names the flag,
    what it needs and what there is."""
    by_device: dict[str, list[_Footprint]] = defaultdict(list)
    for model in models:
        if load := _footprint(model):
            by_device["cuda:0" if model.device == "cuda" else model.device].append(load)
    for device, there in by_device.items():
        num_bytes = free_host_bytes() if device == "cpu" else cuda.total_bytes(device)
        if num_bytes:
            _check_device(device, there, num_bytes)


def _footprint(model: Model) -> _Footprint | None:
    """None if its files do not say. Errors as of `check`."""
    tensors = [
        each for path in sorted(model.directory.glob("*.safetensors")) for each in _tensors(model, path)
    ]
    named = [
        str(part.get("dtype") or part.get("torch_dtype"))
        for part in (text_config(model.config), model.config)
    ]
    if not tensors:  # files without headers are taken for tensors of the config's dtype, if it names one
        stored = next((name for name, known in _FORMATS.items() if known == named[1]), "")
        sizes = [path.stat().st_size for path in model.directory.glob("pytorch_model*.bin")]
        tensors = [_Tensor(stored, size // _WIDTHS.get(named[1], 1), size) for size in sizes]
    if not tensors:
        return None
    is_quantised = "quantization_config" in model.config
    dtype = model.dtype
    if dtype == "auto":
        largest = _FORMATS.get(max(tensors, key=lambda each: each.num_bytes).dtype, "bfloat16")
        dtype = next((name for name in named if name in _WIDTHS), largest)
        if not is_quantised:
            dtype = default_dtype(dtype, model.device)
        if model.source == EMBEDDED and not model.on_cuda:
            dtype = "float32"
    width = _WIDTHS[dtype]
    weights = sum(
        each.num_values * width if each.dtype in _FORMATS and not is_quantised else each.num_bytes
        for each in tensors
    )
    kv_cache = _kv_values_per_token(model.config) * width * model.num_kv_tokens
    return _Footprint(model, weights * model.count, kv_cache * model.count, dtype)


def _check_device(device: str, loads: Sequence[_Footprint], num_bytes: int) -> None:
    weights, caches = sum(load.weights for load in loads), sum(load.kv_cache for load in loads)
    there = f"{gigabytes(num_bytes)} of memory {'is free' if device == 'cpu' else f'has {device}'}"
    if weights > num_bytes:
        load = max(loads, key=lambda each: each.weights)
        times = f"{load.model.count} times " if load.model.count > 1 else ""
        raise ConfigError(
            f"{load.model.given}: {times}its weights take "
            f"{gigabytes(load.weights)} in {load.dtype}, and {there}; "
            "give a smaller model or a narrower --dtype"
        )
    if weights + caches > num_bytes:
        most = (num_bytes - weights) * loads[0].model.num_kv_tokens // caches
        raise ConfigError(
            f"--num-kv-tokens {loads[0].model.num_kv_tokens}: the KV cache takes {gigabytes(caches)} beside "
            f"{gigabytes(weights)} of weights, and {there}; give at most {most}"
        )


def _kv_values_per_token(config: dict[str, Any]) -> int:
    """Numbers that the KV cache keeps of a token; 0 where the config has no usual names for them."""
    text = text_config(config)
    try:
        num_layers = _num_attending(text) - int(text.get("num_kv_shared_layers") or 0)
        num_heads = _first(text, "num_attention_heads", "n_head")
        num_kv_heads = int(text.get("num_key_value_heads") or num_heads)
        head_dim = int(text.get("head_dim") or _first(text, "hidden_size", "n_embd") // num_heads)
    except (StopIteration, TypeError, ValueError, ZeroDivisionError):
        return 0
    return 2 * num_layers * num_kv_heads * head_dim


def _num_attending(text: dict[str, Any]) -> int:
    """Layers with keys and values, as the config counts or lists them; recurrent ones have none."""
    num_layers = _first(text, "num_hidden_layers", "n_layer")
    if types := text.get("layer_types") or text.get("layers_block_type"):
        return sum(kind not in _WITHOUT_KEYS for kind in types)
    if (indices := text.get("attn_layer_indices")) is not None:
        return len(indices)
    return num_layers // int(text.get("full_attention_interval") or 1)


def _first(config: dict[str, Any], *names: str) -> int:
    """The value under the first of these names; raises StopIteration if there is none."""
    return int(next(config[name] for name in names if name in config))


def _tensors(model: Model, path: Path) -> Iterator[_Tensor]:
    """The tensors of a safetensors file. Errors as of `check`."""
    what = f"{model.given}: {path.name}"
    num_there = path.stat().st_size
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
            tensors = [each for name, each in header.items() if name != "__metadata__"]
            num_needed = 8 + length + max((each["data_offsets"][1] for each in tensors), default=0)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{what} is no safetensors file, or cut short") from None
    if num_there < num_needed:
        raise ConfigError(f"{what} is cut short: {num_there} of {num_needed} bytes")
    for each in tensors:
        begin, end = each["data_offsets"]
        yield _Tensor(each["dtype"], math.prod(each["shape"]), end - begin)


def gigabytes(num_bytes: int) -> str:
    """In GB, or in MB below one."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def free_host_bytes() -> int:
    """Bytes that can still be allocated on this machine, within the limit of a container."""
    limit, used = _cgroup(_CGROUP)
    return min(_meminfo("MemAvailable"), max(0, limit - used))


def total_host_bytes() -> int:
    """Bytes of this machine, within the limit of a container."""
    return min(_meminfo("MemTotal"), _cgroup(_CGROUP)[0])


def _meminfo(name: str) -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_MEMINFO} does not say {name}")


def _cgroup(directory: Path) -> tuple[int, int]:
    """Bytes that a container may use, practically infinite without a limit, and that it uses."""
    for names in _LIMITS_AND_USES:
        try:
            limit, used = ((directory / name).read_text().strip() for name in names)
        except OSError:
            continue
        return _UNLIMITED if limit == "max" else int(limit), int(used)
    return _UNLIMITED, 0
