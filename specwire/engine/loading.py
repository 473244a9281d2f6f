"""Load a model, or say exactly why it cannot be served: refuse, never approximate.

A model passes three gates: its config must describe a causal language model without recurrent state;
its weights must all be in the checkpoint; and at last its logits through the paged engine, in pieces
and after a rollback, must equal its own. The last gate is the one that knows no list of models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specwire.engine import attention
from specwire.engine.packing import pack_linears
from specwire.engine.runner import Feed, ModelRunner, context_length
from specwire.errors import ModelLoadError, SpecwireError

# Largest root mean square error of a row of logits against the spread of its reference.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_CHECK_TOKENS = 12
_MAX_WINDOW_CHECKED = 256
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_model(source: str | os.PathLike[str], *, dtype: str = "auto", device: str = "cpu") -> Any:
    """Load a causal language model for the engine, and check that the engine computes what it computes.

    Args:
        source: directory with config and weights, or the id of a model on the hub.
        dtype: of the weights: a torch dtype by name, or `auto` for that of the checkpoint.
        device: where to put it.

    Returns:
        The transformers model in eval mode, with the engine's attention.

    Raises:
        ModelLoadError: naming the source and the reason.
    """
    source = os.fspath(source)
    _check_source(source)
    with _naming(source):
        _check_dtype(dtype)
        check_config(AutoConfig.from_pretrained(source))
        model = _load_weights(source, dtype).to(device)
        pack_linears(model)
        self_check(model)
    return model


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Turn any failure into a ModelLoadError that names the source."""
    try:
        yield
    except SpecwireError as error:
        raise ModelLoadError(f"{source}: {error}") from error
    except Exception as error:
        # Corrupt files surface as whatever the parser of the format raises; its first line says enough.
        lines = str(error).strip().splitlines() or ["no message"]
        raise ModelLoadError(f"{source}: {type(error).__name__}: {lines[0]}") from error


def _check_source(source: str) -> None:
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{source}: no config.json in this directory")
    elif path.exists() or not _HUB_ID.fullmatch(source):
        raise ModelLoadError(f"{source}: no such model directory")


def _check_dtype(dtype: str) -> None:
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ModelLoadError(f"dtype {dtype!r} is not one of torch's")


def check_config(config: Any) -> None:
    """Refuse by its config what the engine can never serve.

    Raises:
        ModelLoadError: an encoder-decoder, or layers with recurrent state.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{config.model_type!r} is an encoder-decoder, not a causal language model")
    refused = set(getattr(text, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if refused:
        raise ModelLoadError(
            f"{config.model_type!r} has layers of type {', '.join(sorted(refused))}; only full and "
            "sliding-window attention can be rolled back"
        )


def _load_weights(source: str, dtype: str) -> Any:
    """The model with every weight from the checkpoint; none may be made up."""
    attention.register()
    model, info = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        attn_implementation=attention.ATTENTION_NAME,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # to name them below; none is accepted
    )
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(
            f"{model.config.model_type!r} keeps a recurrent state, which cannot be rolled back"
        )
    for name in ("missing_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
        if problem := info.get(name):
            first = ", ".join(str(key) for key in list(problem)[:3])
            raise ModelLoadError(f"the checkpoint does not fill the model: {len(problem)} {name}: {first}")
    return model.eval()


def self_check(model: Any) -> None:
    """Compare packed, chunked and rolled back logits with the model's own full forward pass.

    Two sequences share the rows; one of them goes wrong, is truncated and goes right. Sliding windows
    are exceeded when they are at most 256 tokens.

    Raises:
        ModelLoadError: the logits differ, so the engine does not compute this model.
    """
    attention.register()
    tokens = _check_ids(model)
    reference = _own_logits(model, tokens).repeat(2, 1)
    # Small pages are read by the portable path, large ones on CUDA by the paged kernel.
    page_sizes = (4, 256) if model.device.type == "cuda" else (4,)
    errors = []
    for size in page_sizes:
        runner = ModelRunner(model, num_pages=2 * (len(tokens) // size + 2), page_size=size)
        errors.append(_relative_error(_packed_logits(runner, tokens), reference))
    error = float(np.max(errors))  # not a number if any of them is
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    if not error <= tolerance:  # also when it is not a number
        raise ModelLoadError(
            f"self-check failed: logits through the engine differ from the model's own by {error:.2g} "
            f"of their spread ({tolerance:g} allowed in {model.dtype})"
        )


def _check_ids(model: Any) -> list[int]:
    """Token ids spread over the vocabulary, enough of them to leave a small window."""
    text = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or 0
    wanted = _CHECK_TOKENS + (window if window <= _MAX_WINDOW_CHECKED else 0)
    num_tokens = min(wanted, context_length(model.config) or wanted)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids: list[int] = np.random.default_rng(0).integers(vocab_size, size=num_tokens).tolist()
    return ids


def _packed_logits(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """Logits [2 * num_tokens, vocab_size] of the same tokens, in two pieces and then in one."""
    first = len(tokens) // 2
    with runner.new_sequence() as pieces, runner.new_sequence() as whole:
        wrong = tokens[first : first + 3][::-1]
        start = runner.forward([Feed(pieces, tokens[:first] + wrong, first + len(wrong))])[:first]
        pieces.truncate(first)
        rest = len(tokens) - first
        both = runner.forward([Feed(pieces, tokens[first:], rest), Feed(whole, tokens, len(tokens))])
    return torch.cat([start, both])


@torch.inference_mode()
def _own_logits(model: Any, tokens: list[int]) -> Tensor:
    """The model's own eager forward without any cache, float32 [num_tokens, vocab_size]."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(attention.ATTENTION_NAME)
    return logits


def _relative_error(logits: Tensor, reference: Tensor) -> float:
    """Largest over rows of the error's root mean square, over that of the reference about its mean."""
    if logits.shape != reference.shape:
        return float("inf")
    spread = reference.std(dim=-1, correction=0).clamp_min(1e-9)
    error = (logits - reference).square().mean(dim=-1).sqrt() / spread
    return float(error.max())


def describe(model: Any, source: str | os.PathLike[str] = "") -> dict[str, Any]:
    """What the handshake tells about a model.

    Returns:
        `context_len` and `vocab_size` (in tokens; the latter as wide as the logits),
        `num_parameters`, `dtype` by name, and `eos_token_ids`, a sorted tuple.

    Raises:
        ModelLoadError: the config names no context length.
    """
    context_len = context_length(model.config)
    if context_len is None:
        raise ModelLoadError(f"{os.fspath(source)}: the config names no context length")
    head = model.get_output_embeddings()
    text = model.config.get_text_config(decoder=True)
    return {
        "context_len": context_len,
        "vocab_size": int(text.vocab_size if head is None else head.weight.shape[0]),
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "eos_token_ids": _eos_token_ids(model),
    }


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """From the generation config where there is one, since chat models end their turns with other tokens."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(sorted({ids} if isinstance(ids, int) else set(ids)))
