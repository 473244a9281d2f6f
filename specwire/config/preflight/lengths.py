"""The context of a model, by its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specwire.config.preflight.models import Files, text_config
from specwire.errors import ConfigError

RELATIVE_LEN = 2048
"""Longest sequence of models whose positions are distances; an encoder takes memory by its square."""
_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_ORIGINAL = "original_max_position_embeddings"


def check(files: Files) -> None:
    """Refuse a length over the model's context, as far as its `config.json` says.

    Raises:
        ConfigError: names the flag, the model and its context.
    """
    most, asked = context_len(text_config(files.config).get), files.model.max_model_len
    if most is not None and asked > most:
        raise ConfigError(f"--max-model-len {asked}: {files.model.given} has a context of {most} tokens")


def context_len(get: Callable[[str], Any]) -> int | None:
    """Maximum tokens of one sequence; None where the config names no limit.

    Rotary scalings that depend on the longest sequence in the batch would let sequences affect each other and
    invalidate cached keys; up to their original length they are constant, so that is the limit. Where
    positions only enter as distances, as in T5, no length is too long for the model: the limit bounds memory.

    Args:
        get: the value of a name in the config of the text model, or None.
    """
    limit = next((int(v) for name in _NAMES if isinstance(v := get(name), int)), None)
    for rope in _rope_settings(get("rope_parameters") or get("rope_scaling")):
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("dynamic", "longrope"):
            original = rope.get(_ORIGINAL) or (get(_ORIGINAL) if kind == "longrope" else None) or limit
            limit = original if limit is None else min(limit, original or limit)
    if get("relative_attention_num_buckets") is not None:
        return max(limit or 0, RELATIVE_LEN)
    return limit


def _rope_settings(parameters: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one dict, or one for each layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters or "type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]
