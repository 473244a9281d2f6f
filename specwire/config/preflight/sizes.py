"""What a model takes of memory, by its config and the headers of its weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specwire.config.flags import flag_name
from specwire.config.preflight.models import Files
from specwire.errors import ConfigError

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its format."""
_FORMATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


class _Tensor(NamedTuple):
    dtype: str
    num_values: int
    num_bytes: int


@dataclass(frozen=True)
class ModelSize:
    """What a model takes.

    Attributes:
        weights: bytes.
        kv_per_token: bytes of a token in the KV cache; 0 if that is not known.
        dtype: format of the weights.
    """

    weights: int
    kv_per_token: int
    dtype: str


def size(files: Files, dtype: str, *, on_cuda: bool) -> ModelSize | None:
    """What a model takes when it is loaded.

    Args:
        dtype: `auto`, or a name of WIDTHS.
        on_cuda: where `auto` stores float32 as bfloat16.

    Returns:
        None if its files do not say.

    Raises:
        ConfigError: a file is cut short; names the flag, the model and the file.
    """
    tensors = [
        each for path in sorted(files.directory.glob("*.safetensors")) for each in _tensors(files, path)
    ]
    if not tensors:
        return None
    is_quantised = "quantization_config" in files.config
    own = _own_dtype(files.config, tensors)
    auto = "bfloat16" if on_cuda and own == "float32" and not is_quantised else own
    chosen = auto if dtype == "auto" else dtype
    weights = sum(
        each.num_values * WIDTHS[chosen] if each.dtype in _FORMATS and not is_quantised else each.num_bytes
        for each in tensors
    )
    return ModelSize(weights, kv_values_per_token(files.config) * WIDTHS[chosen], chosen)


def _own_dtype(config: dict[str, Any], tensors: list[_Tensor]) -> str:
    """What the config names, else what the largest tensor is stored in."""
    for part in (text_config(config), config):
        named = str(part.get("dtype") or part.get("torch_dtype"))
        if named in WIDTHS:
            return named
    return _FORMATS.get(max(tensors, key=lambda each: each.num_bytes).dtype, "bfloat16")


def kv_values_per_token(config: dict[str, Any]) -> int:
    """Numbers that the KV cache keeps of a token; 0 where the config has no usual names for them."""
    text = text_config(config)
    try:
        num_layers = _first(text, "num_hidden_layers", "n_layer") - int(text.get("num_kv_shared_layers") or 0)
        num_heads = _first(text, "num_attention_heads", "n_head")
        num_kv_heads = int(text.get("num_key_value_heads") or num_heads)
        head_dim = int(text.get("head_dim") or _first(text, "hidden_size", "n_embd") // num_heads)
    except (StopIteration, TypeError, ValueError, ZeroDivisionError):
        return 0
    return 2 * num_layers * num_kv_heads * head_dim


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part about the language model."""
    found = config.get("text_config")
    return found if isinstance(found, dict) else config


def _first(config: dict[str, Any], *names: str) -> int:
    """The value under the first of these names; raises StopIteration if there is none."""
    return int(next(config[name] for name in names if name in config))


def _tensors(files: Files, path: Path) -> Iterator[_Tensor]:
    """The tensors of a safetensors file. Errors as of `size`."""
    what = f"{flag_name(files.name)} {files.source}: {path.name}"
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
