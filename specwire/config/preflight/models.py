"""The files of a model, in a directory or of the hub, in its cache or not; and what its config says."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specwire import embedded
from specwire.config.extras import missing_for, unshared_reason
from specwire.config.flags import flag_name
from specwire.config.models import EMBEDDED, EMULATED
from specwire.errors import ConfigError

log = logging.getLogger(__name__)

_HUB_TIMEOUT_S = 2.0
"""The answer of a preflight is due within 3 s."""
RELATIVE_LEN = 2048
"""Longest sequence of models whose positions are distances; an encoder takes memory by its square."""
UNBOUNDED_LEN = 1 << 20
"""Of models that know no positions; what the KV cache counts as room is the limit."""
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_ORIGINAL = "original_max_position_embeddings"
_CONFIG, _TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
_REFUSED = {401: "is private or does not exist: set HF_TOKEN", 403: "may not be read with this HF_TOKEN"}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is going to be loaded.

    Attributes:
        name, source: the field that names it, and its value.
        is_draft: of the embedded pair.
        device_name, device: likewise; the first of the devices.
        num_devices: each with the whole model; those on the CPU share its memory.
        num_ranks: that share each whole model.
        is_here: whether it is loaded on this machine, and not where Ray places it.
        num_kv_tokens: 0 where the cache takes what is left.
        max_model_len: 0 for the model's own context.
        config_file: its config's name.
        directory, config: of its files, and what its config says; set by `find`.
    """

    name: str
    source: str
    is_draft: bool = False
    dtype: str = "auto"
    device_name: str = "device"
    device: str = "cpu"
    num_devices: int = 1
    num_ranks: int = 1
    is_here: bool = True
    num_kv_tokens: int = 0
    max_model_len: int = 0
    config_file: str = _CONFIG
    directory: Path = field(default=Path(), compare=False)
    config: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def given(self) -> str:
        """Flag and value that name it."""
        return f"{flag_name(self.name)} {self.source}"

    @property
    def on_cuda(self) -> bool:
        """Whether its device is no CPU."""
        return self.device != "cpu"

    @property
    def count(self) -> int:
        """How often it is in the memory of its device."""
        return 1 if self.on_cuda else self.num_devices


def check(model: Model) -> None:
    """Refuse quantised weights that transformers could not read or ranks not share, and a length over the
    model's context, as far as its `config.json` says. ConfigError says what to do."""
    wanted, asked = model.config.get("quantization_config"), model.max_model_len
    if found := missing_for(wanted, on_cuda=model.on_cuda):
        raise ConfigError(f"{model.given}: {found}")
    if model.num_ranks > 1 and (reason := unshared_reason(wanted)):
        raise ConfigError(f"--tensor-parallel-size {model.num_ranks}: {model.given}: {reason}")
    most = context_len(text_config(model.config).get)
    if most is not None and asked > most:
        raise ConfigError(f"--max-model-len {asked}: {model.given} has a context of {most} tokens")


def find(model: Model) -> Model | None:
    """The model with its files: embedded, in a directory, or on the hub.

    None where there are none yet: the device is emulated, or the hub has the model and the cache has not.
    ConfigError names the flag, the source and what to do.
    """
    source = model.source
    if source.startswith(EMULATED):
        return None
    if source == EMBEDDED:
        directory: Path | None = embedded.DRAFT_DIR if model.is_draft else embedded.TARGET_DIR
    elif Path(source).is_dir():
        directory = Path(source)
    else:
        directory = _cached(model, _CONFIG)
    if directory is None:
        return None
    return replace(model, directory=directory, config=_read_config(model, directory))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part about the language model, or about the layers of a drafter."""
    found = config.get("text_config") or config.get("transformer_layer_config")
    return found if isinstance(found, dict) else config


def context_len(get: Callable[[str], Any]) -> int | None:
    """Maximum tokens of one sequence; None where the config names no limit.

    Rotary scalings that depend on the longest sequence in the batch would let sequences affect each other and
    invalidate cached keys; up to their original length they are constant, so that is the limit. Where
    positions only enter as distances, as in T5, no length is too long for the model: the limit bounds memory.

    Args:
        get: the value of a name in the config of the text model, or None.
    """
    limit = next((int(v) for name in _CONTEXT_NAMES if isinstance(v := get(name), int)), None)
    for rope in _rope_settings(get("rope_parameters") or get("rope_scaling")):
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("dynamic", "longrope"):
            original = rope.get(_ORIGINAL) or (get(_ORIGINAL) if kind == "longrope" else None) or limit
            limit = original if limit is None else min(limit, original or limit)
    if get("relative_attention_num_buckets") is not None:
        return max(limit or 0, RELATIVE_LEN)
    types = get("layer_types")
    if limit is None and types and set(types) == {"linear_attention"}:
        return UNBOUNDED_LEN
    return limit


def _rope_settings(parameters: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config: one dict, or one for each layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters or "type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


def check_tokenizer(name: str, source: str) -> None:
    """Refuse a given tokenizer that is neither in a directory nor on the hub. Errors as of `find`."""
    if source not in ("", EMBEDDED) and not source.startswith(EMULATED) and not Path(source).is_dir():
        _cached(Model(name=name, source=source), _TOKENIZER_CONFIG)


def _read_config(model: Model, directory: Path) -> dict[str, Any]:
    what, file = model.given, model.config_file
    path = directory / file
    if not path.is_file():
        other = ", or a hub id" if file == _CONFIG else ""
        raise ConfigError(
            f"{what}: no {file} in this directory; give the one that `save_pretrained` wrote{other}"
        )
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: {file} cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{what}: {file} holds no object")
    return found


def _cached(model: Model, file: str) -> Path | None:
    """The directory of a model of the hub in the cache; None where it is still to be downloaded. Raises
    ConfigError if it is neither there nor on the hub.

    One in the cache is loaded without the hub where that cannot be reached: the hub's client would repeat
    each request for half a minute.
    """
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:
        return None  # what is missing is said when it is imported for the model
    try:
        cached = try_to_load_from_cache(model.source, file)
    except HFValidationError:
        raise ConfigError(f"{model.given}: is neither a directory nor a hub id") from None
    found = Path(cached).parent if isinstance(cached, str) else None
    problem = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else _problem(model.source, file)
    if not problem:
        return found
    if found is None:
        raise ConfigError(f"{model.given}: is no directory, and cannot be taken from the hub: {problem}")
    if not constants.is_offline_mode():
        log.warning("%s: taken from the cache: %s", model.given, problem)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that are started
        constants.HF_HUB_OFFLINE = True  # for this one, which has read the variable
    return found


def _problem(source: str, file: str) -> str:
    """Why a file cannot be taken from the hub; empty if it can."""
    from huggingface_hub import constants

    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(_ask(source, file)), daemon=True)
    asking.start()
    asking.join(_HUB_TIMEOUT_S)  # the HTTP library's own timeout does not bound the look-up of the name
    late = f"{constants.ENDPOINT} cannot be reached (no answer within {_HUB_TIMEOUT_S:g} s)"
    return answers[0] if answers else late


def _ask(source: str, file: str) -> str:
    """As `_problem`, without a limit on the time."""
    from huggingface_hub import constants, get_session, get_token, hf_hub_url

    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = get_session().head(hf_hub_url(source, file), headers=headers, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # of the HTTP library, which is the hub's choice
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    status = answer.status_code
    if status == 404:
        if answer.headers.get("x-error-code") != "EntryNotFound":
            return "there is no such model"
        return f"the model has no {file}" if file == _CONFIG else ""  # some tokenizers have no config
    return _REFUSED.get(status, f"{constants.ENDPOINT} answers with status {status}" if status >= 400 else "")
