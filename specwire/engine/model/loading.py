"""Loads a model, or reports exactly why it cannot be served: refuse, never approximate.

A model must pass three checks: its config describes a causal language model; all of its weights are in the
checkpoint; and its logits through the paged engine, in chunks and after a rollback, equal its own. The last
check needs no list of supported models.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.quantizers import AutoHfQuantizer

from specwire.config import extras
from specwire.config.cpu import default_dtype
from specwire.engine.attention import paged as attention
from specwire.engine.attention.probe import ATTENTION_TYPES, PLAIN_TYPES, RECURRENT_TYPES
from specwire.engine.batch import Feed
from specwire.engine.model import lora
from specwire.engine.model.packing import pack_linears
from specwire.engine.model.runner import ModelRunner, context_length, num_embeddings, relative_error
from specwire.errors import ModelLoadError, SpecwireError
from specwire.rule.captured import EagerReplay, Replay

# Largest root mean square error of a row of logits, relative to the standard deviation of its reference.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_CHECK_TOKENS = 12
_MAX_WINDOW_CHECKED = 256
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_model(
    source: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "cpu",
    packs: bool = True,
    kind: Any = AutoModelForCausalLM,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """Load a causal language model for the engine, and check that the engine reproduces its logits.

    Args:
        source: directory with config and weights, or a hub id.
        dtype: of the weights: the name of a torch dtype, or `auto` (`default_dtype`). Quantised weights keep
            their format.
        device: where to load it.
        packs: whether weights may be packed on a CPU; packed ones cannot learn.
        kind: what loads it, of transformers' auto classes.
        check: in place of `self_check`, for another kind.

    Returns:
        The transformers model in eval mode, with the engine's attention.

    Raises:
        ModelLoadError: naming the source and the reason.
    """
    source = os.fspath(source)
    with errors_naming(source):
        config = read_config(source, may_encode=kind is not AutoModelForCausalLM)
        wanted = weights_dtype(config, dtype, device)
        with naming_method(config):
            model = load_weights(source, wanted, kind=kind, **placement(config, device))
            if not is_quantised(config):
                model = model.to(device)
            if packs:
                pack_linears(model)
            (check or self_check)(model)
    return model


def read_config(source: str, *, may_encode: bool = False) -> Any:
    """The config of a model, checked as far as possible without its weights.

    Args:
        may_encode: it may be an encoder-decoder.

    Raises:
        ModelLoadError: there is none, or it describes a model that cannot be served.
    """
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError("no config.json in this directory")
    elif path.exists() or not _HUB_ID.fullmatch(source):
        raise ModelLoadError("no such model directory")
    generation_config(path)
    config = AutoConfig.from_pretrained(source)
    if not (may_encode and config.is_encoder_decoder):
        check_config(config)
    _check_quantiser(config)
    return config


def generation_config(directory: Path) -> dict[str, Any]:
    """What the directory of a model says of generating; empty where it does not.

    Raises:
        ModelLoadError: it cannot be read; transformers would go on without it.
    """
    path = directory / "generation_config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {})
    except (OSError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path.name}: {error}") from None


@contextlib.contextmanager
def errors_naming(source: str) -> Iterator[None]:
    """Turn any failure into a ModelLoadError that names the source."""
    try:
        yield
    except SpecwireError as error:
        raise ModelLoadError(f"{source}: {error}") from error
    except Exception as error:
        # Corrupt files raise whatever the parser of their format raises; the first line is enough.
        lines = str(error).strip().splitlines() or ["no message"]
        raise ModelLoadError(f"{source}: {type(error).__name__}: {lines[0]}") from error


def naming_method(config: Any) -> contextlib.AbstractContextManager[None]:
    """As `errors_naming`, with the method by which weights are quantised, if they are."""
    if not is_quantised(config):
        return contextlib.nullcontext()
    return errors_naming(f"its weights are quantised by {extras.quantiser(config.quantization_config)}")


def check_config(config: Any) -> None:
    """Refuse a model by its config if the engine cannot serve it.

    Raises:
        ModelLoadError: an encoder-decoder, no causal language model, recurrent state that transformers' cache
            does not have, or attention that the engine cannot replace.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{config.model_type!r} is an encoder-decoder, not a causal language model")
    types = set(getattr(text, "layer_types", None) or ())
    if refused := types - ATTENTION_TYPES - RECURRENT_TYPES - PLAIN_TYPES:
        raise ModelLoadError(
            f"{config.model_type!r} has layers of type {', '.join(sorted(refused))}; only full and "
            "sliding-window attention and states in transformers' cache are served"
        )
    model_class = _model_class(config)
    if getattr(model_class, "_is_stateful", False) and not is_recurrent(config):
        raise ModelLoadError(f"{config.model_type!r} keeps a recurrent state, which cannot be rolled back")
    if not model_class._can_set_attn_implementation():
        raise ModelLoadError(
            f"{config.model_type!r} has attention of its own, and not transformers' attention interface"
        )


def is_recurrent(config: Any) -> bool:
    """Whether some layers keep a state."""
    types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    return not RECURRENT_TYPES.isdisjoint(types or ())


def _model_class(config: Any) -> Any:
    """transformers' class of the causal language model."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config(decoder=True)
    if text is not config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"{config.model_type!r} reads more than text, which is not served; give its language model of "
            f"type {text.model_type!r}, saved by itself (docs/models.md)"
        )
    raise ModelLoadError(
        f"transformers {transformers.__version__} has no causal language model of type {config.model_type!r}"
    )


def is_quantised(config: Any) -> bool:
    """Whether transformers loads the weights through one of its quantisers, which also places them."""
    return getattr(config, "quantization_config", None) is not None


def _check_quantiser(config: Any) -> None:
    """transformers ignores a method that it does not know, and would read the stored bits as weights."""
    wanted = getattr(config, "quantization_config", None)
    method = extras.quantiser(wanted)
    if isinstance(wanted, dict) and not (method and AutoHfQuantizer.supports_quant_method(wanted)):
        raise ModelLoadError(f"transformers {transformers.__version__} knows no quantisation {method!r}")
    if missing := extras.missing_for(wanted):
        raise ModelLoadError(missing)


def weights_dtype(config: Any, dtype: str, device: str) -> str:
    """The dtype to load the weights in, on this device; see `load_model`."""
    if dtype != "auto" or is_quantised(config):
        return dtype
    stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
    found = default_dtype(stored, device)
    return dtype if found == stored else found


def placement(config: Any, device: str) -> dict[str, Any]:
    """Keywords that place quantised weights: many quantisers create them on the device, for good."""
    on_device = is_quantised(config) and torch.device(device).type != "cpu"
    return {"device_map": {"": device}} if on_device else {}


def load_weights(source: str | None, dtype: str, *, kind: Any = AutoModelForCausalLM, **keywords: Any) -> Any:
    """The model with every weight taken from the checkpoint; none may be initialised at random.

    Args:
        source: directory or hub id; None where `keywords`, for `from_pretrained`, have the weights.
        dtype: the name of a torch dtype, or `auto`.
        kind: what loads it, of transformers' auto classes.

    Raises:
        ModelLoadError: a weight is missing or has another shape.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ModelLoadError(f"dtype {dtype!r} is not one of torch's")
    attention.register()
    try:
        model, info = kind.from_pretrained(
            source,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention.ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below; none is accepted
            **keywords,
        )
    except KeyError as error:
        if error.args != (attention.ATTENTION_NAME,):
            raise
        raise ModelLoadError("some layer has attention of its own, whatever the interface says") from None
    for name in ("missing_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
        if problem := info.get(name):
            first = ", ".join(str(key) for key in list(problem)[:3])
            raise ModelLoadError(f"the checkpoint does not fill the model: {len(problem)} {name}: {first}")
    if not is_quantised(model.config):
        _check_left_over(model, info.get("unexpected_keys") or ())
    return model.eval()


def _check_left_over(model: Any, keys: Iterable[str]) -> None:
    """Refuse tensors that transformers left out though it filled their layer: scales of weights that are in 8
    bits, or a bias, change what the layer computes."""
    layers = {name for name, module in model.named_modules() if dict(module.named_parameters(recurse=False))}
    if found := sorted(key for key in keys if key.rpartition(".")[0] in layers):
        problem = f"has {len(found)} tensors that its config.json does not tell of: {', '.join(found[:3])}"
        raise ModelLoadError(f"the checkpoint {problem}; a quantization_config may be missing, or a bias")


def self_check(model: Any) -> None:
    """Compare packed, chunked and rolled back logits with the model's own full forward pass.

    Two sequences share the passes; one of them runs wrong tokens, is truncated and runs the right ones.
    Sliding windows of up to 256 tokens are exceeded.

    Raises:
        ModelLoadError: the logits differ, so the engine does not compute this model.
    """
    attention.register()
    tokens = check_ids(model)
    reference = own_logits(model, tokens).repeat(2, 1)
    for runner in _runners(model, len(tokens)):
        check_logits(model, packed_logits(runner, tokens), reference, tokens)


def load_adapters(model: Any, directories: Mapping[str, Path]) -> None:
    """Attach adapters, by their names in directories as peft writes them, to a model, and check each of them.

    Raises:
        ModelLoadError: naming the flag, the adapter and the reason.
    """
    adapters = []
    for name, directory in directories.items():
        with errors_naming(f"--lora-modules {name}={directory}"):
            adapters.append(lora.read(name, directory))
    with errors_naming("--lora-modules"):
        lora.attach(model, adapters)
    for number, adapter in enumerate(adapters, 1):
        with errors_naming(f"--lora-modules {adapter.name}={directories[adapter.name]}"):
            check_adapter(model, number)


def check_adapter(model: Any, number: int) -> None:
    """Compare logits of a sequence with an adapter, beside one without, with those of passes of the model in
    which all tokens have the adapter, or none has.

    Raises:
        ModelLoadError: they differ.
    """
    tokens = check_ids(model)
    with lora.running(torch.full((len(tokens),), number, device=model.device)):
        adapted = own_logits(model, tokens)
    reference = torch.cat([adapted, own_logits(model, tokens)])
    for runner in _runners(model, len(tokens)):
        check_logits(model, packed_logits(runner, tokens, adapters=(number, 0)), reference)


def _cause(model: Any, tokens: list[int]) -> str:
    """What is known to make logits differ."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "; the model takes no position_ids, and counts the row's tokens instead"
    order = torch.arange(len(tokens), device=model.device)
    numbered = own_logits(model, tokens, position_ids=order[None])
    if relative_error(numbered, own_logits(model, tokens)) > _TOLERANCE[torch.float32]:
        return "; the model numbers positions in a way of its own, not from 0"
    return ""


def check_logits(model: Any, logits: Tensor, reference: Tensor, tokens: list[int] | None = None) -> None:
    """Compare the engine's logits with the model's own.

    Raises:
        ModelLoadError: they differ; it says what is known to make those of such tokens differ.
    """
    error = relative_error(logits, reference)
    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE[torch.bfloat16])
    if not error <= tolerance:  # also if it is NaN
        cause = _cause(model, tokens) if tokens is not None else ""
        raise ModelLoadError(
            f"self-check failed: logits through the engine differ from the model's own by {error:.2g} "
            f"of their spread ({tolerance:g} allowed in {model.dtype}){cause}"
        )


def _runners(model: Any, num_tokens: int) -> Iterator[ModelRunner]:
    """Of two sequences. On CUDA small and large pages use different kernels, and steps may be padded."""
    modes: list[tuple[int, Replay | None]] = [(4, None)]
    if model.device.type == "cuda":
        modes += [(256, None), (256, EagerReplay())]
    for size, replay in modes:
        yield ModelRunner(model, num_pages=2 * (num_tokens // size + 2), page_size=size, replay=replay)


def check_ids(model: Any, least: int = _CHECK_TOKENS) -> list[int]:
    """Random token ids, enough of them to exceed a small window."""
    text = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or 0
    wanted = least + (window if window <= _MAX_WINDOW_CHECKED else 0)
    num_tokens = min(wanted, context_length(model.config) or wanted)
    ids: list[int] = np.random.default_rng(0).integers(num_embeddings(model), size=num_tokens).tolist()
    return ids


def packed_logits(
    runner: ModelRunner,
    tokens: list[int],
    inputs: tuple[list[int], list[int]] = ([], []),
    adapters: tuple[int, int] = (0, 0),
) -> Tensor:
    """Logits [2 * num_tokens, vocab_size] of the same tokens: in two chunks with one by itself between them,
    as in decoding, and in one beside the second.

    Args:
        inputs: what an encoder reads before each.
        adapters: of each.
    """
    first = len(tokens) // 2
    with runner.new_sequence() as pieces, runner.new_sequence() as whole:
        pieces.encoder_len, whole.encoder_len = map(len, inputs)
        pieces.adapter, whole.adapter = adapters
        pieces.committed_len = first
        wrong = tokens[first : first + 3][::-1]
        begun = Feed(pieces, inputs[0] + tokens[:first] + wrong, first + len(wrong))
        start = runner.forward([begun])[:first]
        pieces.truncate(len(inputs[0]) + first)
        one = runner.forward([Feed(pieces, tokens[first : first + 1], 1)])
        rest = tokens[first + 1 :]
        feeds = [Feed(pieces, rest, len(rest)), Feed(whole, inputs[1] + tokens, len(tokens))]
        both = runner.forward(feeds if rest else feeds[1:])
    return torch.cat([start, one, both])


@torch.inference_mode()
def own_logits(model: Any, tokens: list[int], **keywords: Any) -> Tensor:
    """The model's own eager forward without any cache, float32 [num_tokens, vocab_size]."""
    with eager(model):
        ids = torch.tensor([tokens], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False, **keywords).logits[0].float()
    return logits


@contextlib.contextmanager
def eager(*models: Any) -> Iterator[None]:
    """Passes in the body attend as transformers does."""
    for each in models:
        each.set_attn_implementation("eager")
    try:
        yield
    finally:
        for each in models:
            each.set_attn_implementation(attention.ATTENTION_NAME)


def describe(model: Any, source: str | os.PathLike[str] = "") -> dict[str, Any]:
    """The description of a model for the handshake.

    Returns:
        `context_len` in tokens, `vocab_size` (the width of the logits), `num_parameters`, the name of the
        `dtype`, and `eos_token_ids`, a sorted tuple.

    Raises:
        ModelLoadError: the config names no context length.
    """
    context_len = context_length(model.config)
    if context_len is None:
        raise ModelLoadError(f"{os.fspath(source)}: the config names no context length")
    head = model.get_output_embeddings()
    text = model.config.get_text_config(decoder=True)
    # The weight may be a shard.
    vocab_size = text.vocab_size if head is None else getattr(head, "out_features", head.weight.shape[0])
    return {
        "context_len": context_len,
        "vocab_size": int(vocab_size),
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "eos_token_ids": _eos_token_ids(model),
    }


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """From the generation config if there is one: chat models end their turns with further tokens."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    found = [*ids] if isinstance(ids, list | tuple) else [ids]
    if not all(type(each) is int for each in found):
        raise ModelLoadError(f"eos_token_id {ids!r} is neither a token id nor a list of them")
    return tuple(sorted({each for each in found if each >= 0}))  # -1 stands for none
