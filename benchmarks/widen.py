"""A larger model that computes the same function: real costs with real text, without a download.

Every matrix is padded so that nothing new ever reaches the residual stream. Where a padded dimension is
*written*, the weights are zero; where it is only *read*, they are random, since they meet zeros or have
no reader. With h the small hidden size and H the large one:

    hidden        the last H - h dimensions of the residual stream stay zero
    norms         the mean square shrinks by h/H, so the weight takes sqrt(h/H), and epsilon h/H
    heads         the head dimension stays, and with it rotary angles and score scale; new heads get
                  zero columns in the output projection; a query head stays with its key-value head
    MLP           new channels get zero columns in the down projection
    layers        new ones, at the end, have output and down projections of zero

Choose H as a power of 4 times h, and the norms' factor is a power of two: exact in bfloat16 too.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

_RECIPE_VERSION = 1
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a Llama; the head dimension is that of the model that is widened."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


SHAPE_250M = Shape(hidden_size=1024, num_layers=21, num_heads=16, num_kv_heads=8, intermediate_size=2816)
"""About 250 million parameters when made from the embedded target."""
SHAPE_8B = Shape(hidden_size=4096, num_layers=36, num_heads=64, num_kv_heads=16, intermediate_size=14336)
"""About 8 billion; for a GPU."""


def widen(
    small: LlamaForCausalLM, shape: Shape, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> LlamaForCausalLM:
    """The large model with the small one's function.

    Args:
        small: a Llama without biases.
        shape: at least as large in every size, with at least as many query heads to a key-value head.
        dtype: of the weights.
        seed: of those weights that do not matter.
        device: where to make it; billions of random numbers take a CPU minutes.

    Raises:
        ValueError: the small model does not fit into the shape, or is not such a Llama.
    """
    _check(small.config, shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        large = _random_model(_large_config(small.config, shape), dtype, device)
        _fill(large, small)
    return large.eval()


def _random_model(config: LlamaConfig, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    if device == "cpu":
        return LlamaForCausalLM(config).to(dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # four bytes a weight at no time
    try:
        with torch.device(device):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def _check(config: Any, shape: Shape) -> None:
    if not isinstance(config, LlamaConfig) or config.attention_bias or config.mlp_bias:
        raise ValueError(f"only a Llama without biases can be widened, not {config.model_type}")
    small = small_shape(config)
    short = [name for name, size in asdict(small).items() if size > getattr(shape, name)]
    if shape.num_heads % shape.num_kv_heads or _group(shape) < _group(small):
        short.append("num_heads")
    if short:
        raise ValueError(f"{small} does not fit into {shape}: {', '.join(short)}")


def small_shape(config: LlamaConfig) -> Shape:
    """The shape that a config describes."""
    return Shape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
    )


def _group(shape: Shape) -> int:
    return shape.num_heads // shape.num_kv_heads


def _large_config(config: LlamaConfig, shape: Shape) -> LlamaConfig:
    fields = config.to_dict() | {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden_size,
    }
    return LlamaConfig(**fields)


def _fill(large: Any, small: Any) -> None:
    """Overwrite the random weights of `large` wherever the function depends on them."""
    _copy_written(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
    _scale_norm(large.model.norm.weight, small.model.norm.weight)
    if not large.config.tie_word_embeddings:
        _copy_read(large.lm_head.weight, small.lm_head.weight)
    for i, layer in enumerate(large.model.layers):
        if i < len(small.model.layers):
            _fill_layer(layer, small.model.layers[i], large.config, small.config)
        else:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def _fill_layer(large: Any, small: Any, large_config: LlamaConfig, small_config: LlamaConfig) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        _scale_norm(getattr(large, name).weight, getattr(small, name).weight)
    for name in ("gate_proj", "up_proj"):
        _copy_read(getattr(large.mlp, name).weight, getattr(small.mlp, name).weight)
    _copy_written(large.mlp.down_proj.weight, small.mlp.down_proj.weight)
    for name, copy in (("q", _copy_read), ("k", _copy_read), ("v", _copy_read), ("o", _copy_written)):
        copy(
            _by_head(getattr(large.self_attn, f"{name}_proj"), name, large_config),
            _by_head(getattr(small.self_attn, f"{name}_proj"), name, small_config),
        )


def _by_head(projection: nn.Linear, name: str, config: LlamaConfig) -> Tensor:
    """A view whose head dimension is split, so that a corner of it is whole heads of whole groups."""
    num_kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // num_kv_heads if name in "qo" else 1
    heads = (num_kv_heads, group, config.head_dim)
    weight = projection.weight
    return weight.view(-1, *heads) if name == "o" else weight.view(*heads, -1)


def _copy_read(large: Tensor, small: Tensor) -> None:
    """Into the corner; the rest is only read, and stays random."""
    large[_corner(small)] = small.to(large.dtype)


def _copy_written(large: Tensor, small: Tensor) -> None:
    """Into the corner; the rest would be written to the residual stream, and is zero."""
    large.zero_()
    large[_corner(small)] = small.to(large.dtype)


def _corner(small: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in small.shape)


def _scale_norm(large: Tensor, small: Tensor) -> None:
    large[: len(small)] = (small * math.sqrt(len(small) / len(large))).to(large.dtype)


def cached(source: Path, shape: Shape, dtype: torch.dtype, cache: Path, device: str = "cpu") -> Path:
    """The directory of the widened model with its tokenizer; made once for these weights and this shape.

    Args:
        source: directory of the small model, with one `model.safetensors`.
        cache: folder that holds such directories.
        device: as for `widen`; weights that do not matter differ with it.
    """
    weights = (source / "model.safetensors").read_bytes()
    key = hashlib.sha256(weights + f"{_RECIPE_VERSION} {shape} {dtype}".encode()).hexdigest()[:12]
    directory = cache / f"widened-{key}"
    if directory.is_dir():
        return directory
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    unfinished = directory.with_suffix(".tmp")
    widen(small, shape, dtype, device=device).save_pretrained(unfinished)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, unfinished)
    unfinished.rename(directory)
    return directory
