"""The check of all that a command is going to need, by its config: addresses, devices, models, and whether
the token ids of draft and target mean the same."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specwire.config import cuda, ports
from specwire.config.client import HttpConfig
from specwire.config.fields import next_address, split_address
from specwire.config.flags import flag_name
from specwire.config.models import ADAPTER_CONFIG, NO_DRAFT, adapter_directories
from specwire.config.own_methods import DIR, OWN_METHODS
from specwire.config.preflight import memory, models
from specwire.config.preflight.models import Model
from specwire.config.services import CoordinatorConfig, DraftConfig, ModelServiceConfig, VerifyConfig
from specwire.config.speculative import INNER_METHODS
from specwire.config.stack import StackConfig
from specwire.errors import ConfigError, ModelLoadError
from specwire.text import tokenizer

_REMEDIES = {
    errno.EADDRINUSE: "stop what listens there, or give another port (0 picks a free one)",
    errno.EADDRNOTAVAIL: "give an address of this machine",
    errno.EACCES: "give a port from 1024 on",
}
Listened = tuple[tuple[str, ...], str]
"""The name of the field of an address, or those of its host and its port; and the address."""
_TOKENIZER = "tokenizer.json"
_ANY_VOCABULARY = """--speculative-config '{"method": "draft_model", "use_heterogeneous_vocab": true}'"""


@functools.singledispatch
def check(config: Any) -> None:
    """Check the config of `up`, `demo`, a service or the HTTP front; ConfigError says what to do."""
    raise TypeError(config)


@check.register
def _(config: StackConfig) -> None:
    check_addresses(
        [
            (("address",), config.address),
            (config.http_flags, config.http_address),
            *((("metrics_address",), each) for each in config.metrics_addresses),
        ]
    )
    verify = config.verify()
    target = replace(_served(verify, config.replicas), name="target", device=config.device)
    beside = [replace(each, name="draft") for each in _beside(verify, target)]
    draft = Model(
        name="draft",
        source=config.named.model,
        is_draft=True,
        dtype=config.draft_dtype,
        device_name="draft_device",
        device=config.draft_device,
        num_devices=config.replicas if config.draft_in_target else 1,
        num_kv_tokens=config.num_kv_tokens,
    )
    drafts = [draft] if config.named.model != NO_DRAFT else []
    loaded = [target, *beside, *drafts, *_inner("draft", config.named.inner)]
    _check_models(
        [*loaded, *_adapters(config.lora_modules, target)],
        pair=[] if config.target_tokenizer else [target, *drafts],
    )


@check.register
def _(config: VerifyConfig) -> None:
    _check_ports(config, config.replicas, config.replicas)
    target = _served(config, config.replicas)
    drafts = []
    if config.draft_model:
        named = replace(target, name="draft_model", source=config.draft_model, dtype=config.draft_dtype)
        drafts = [replace(named, is_draft=True, max_model_len=0)]
    beside = [*_beside(config, target), *_adapters(config.lora_modules, target)]
    _check_models([target, *drafts, *beside], pair=[target, *drafts])


@check.register
def _(config: DraftConfig) -> None:
    _check_ports(config, 1, 1)
    models.check_tokenizer("target_tokenizer", config.target_tokenizer)
    _check_models([_served(config), *_inner("inner", config.inner)])


@check.register
def _(config: CoordinatorConfig | HttpConfig) -> None:
    _check_ports(config, 1, config.workers)
    models.check_tokenizer("tokenizer", config.tokenizer)


def _check_ports(config: Any, num_served: int, num_metrics: int) -> None:
    """Each at so many consecutive ports."""
    counts = {"address": num_served, "metrics_address": num_metrics}
    check_addresses(
        [
            ((name,), next_address(name, getattr(config, name), n))
            for name, count in counts.items()
            for n in range(count)
        ]
    )


def _check_models(needed: Sequence[Model], pair: Sequence[Model] = ()) -> None:
    """Check all that is loaded.

    Args:
        pair: target and draft, if there are two and their tokens have to be the same.
    """
    for model in needed:
        if model.is_here:
            _check_device(model.device_name, model.device, model.num_devices)
    found = {model: there for model in needed if (there := models.find(model))}
    for model in found.values():
        models.check(model)
    memory.check([model for model in found.values() if model.is_here])
    if len(pair) == 2 and all(model in found for model in pair):
        _check_pair(*(found[model] for model in pair))


def _served(config: ModelServiceConfig, num_devices: int = 1) -> Model:
    return Model(
        name="model",
        source=config.model,
        is_draft=isinstance(config, DraftConfig),
        dtype=config.dtype,
        device=config.device,
        num_devices=num_devices,
        num_ranks=config.tensor_parallel_size,
        is_here=config.tensor_parallel_size == 1,
        num_kv_tokens=0 if config.fills_memory else config.num_kv_tokens,
        max_model_len=config.max_model_len,
    )


def _beside(config: VerifyConfig, target: Model) -> list[Model]:
    """What a target loads from a directory to draft with by itself, besides a draft model."""
    source, directory = config.own
    takes = OWN_METHODS[source].argument if source in OWN_METHODS else ""
    if takes != DIR or not Path(directory).is_dir():
        return []
    return [replace(target, name=source, source=directory, num_ranks=1, max_model_len=0)]  # on each rank


def _adapters(given: str, target: Model) -> list[Model]:
    """The adapters of a target, which are loaded beside it."""
    beside = replace(
        target, name="lora_modules", config_file=ADAPTER_CONFIG, num_kv_tokens=0, max_model_len=0
    )
    return [replace(beside, source=str(directory)) for directory in adapter_directories(given).values()]


def _inner(name: str, inner: str) -> list[Model]:
    """The model that guesses a draft's tokens, if one does."""
    is_model = inner not in ("", *INNER_METHODS)
    return [Model(name=name, source=inner, is_draft=True)] if is_model else []


def check_addresses(addresses: Sequence[Listened]) -> None:
    """Refuse addresses that cannot be bound, and two that have the same port. Empty ones are skipped.
    ConfigError names the flag and the value."""
    taken: dict[str, str] = {}
    for names, address in addresses:
        if not address:
            continue
        host, port = split_address("", address)
        values = (address,) if len(names) == 1 else (host.strip("[]"), port)
        of_host, *_ = said = [f"{flag_name(name)} {value}" for name, value in zip(names, values, strict=True)]
        of_port = said[-1]
        if port and address in taken:
            raise ConfigError(f"{of_port}: is taken by {taken[address]}")
        _check_free(host, port, of_host, of_port)
        taken[address] = of_port.split()[0]


def _check_free(host: str, port: int, of_host: str, of_port: str) -> None:
    try:
        ports.check_free(host.strip("[]"), port)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        # A failed look-up of a name has no errno of the system.
        is_looked_up = bool(error.errno and error.errno > 0)
        problem = os.strerror(error.errno or 0) if is_looked_up else str(error.strerror)
        is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise ConfigError(
            f"{of_port if is_of_port else of_host}: cannot be bound ({problem})" + (remedy and f"; {remedy}")
        ) from None


def _check_device(name: str, device: str, num_devices: int = 1) -> None:
    """Refuse a CUDA device that torch will not find, or as many from there on; ConfigError names the flag."""
    if not device.startswith("cuda"):
        return
    version, is_for_nvidia = cuda.torch_build()
    if version and not is_for_nvidia:
        return  # other drivers are asked by torch itself
    what = f"{flag_name(name)} {device}: "
    if version == "":
        raise ConfigError(f"{what}torch is built for the CPU only; install a build for CUDA, or give cpu")
    num_there = cuda.num_devices()
    if not num_there:
        raise ConfigError(f"{what}there is no CUDA device here; give cpu")
    last = int(device.partition(":")[2] or 0) + num_devices - 1
    if last >= num_there:
        raise ConfigError(
            f"{what}needs cuda:{last}, and the last of {num_there} devices is cuda:{num_there - 1}"
        )


def _check_pair(target: Model, draft: Model) -> None:
    """Refuse a draft that the coordinator would refuse when both are loaded; ConfigError says what to do."""
    what, beside = f"{draft.given}: ", target.given
    pair = (target, draft)
    is_encoder = [bool(model.config.get("is_encoder_decoder")) for model in pair]
    if is_encoder[0] != is_encoder[1]:
        one = "it" if is_encoder[1] else beside
        raise ConfigError(f"{what}does not fit {beside}: {one} is an encoder-decoder, and the other is not")
    if _tokenizer_bytes(target.directory) == _tokenizer_bytes(draft.directory) != b"":
        return
    tokenizers = [_fingerprint(model.directory) for model in pair]
    sizes = [int(model.config.get("vocab_size") or 0) for model in pair]
    if all(tokenizers) and tokenizers[0] != tokenizers[1]:
        raise ConfigError(
            f"{what}its tokenizer is not that of {beside}; give a draft of the same family, "
            f"or {_ANY_VOCABULARY}"
        )
    if not all(tokenizers) and all(sizes) and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{what}its vocabulary has {sizes[1]} tokens, and that of {beside} {sizes[0]}; "
            "give a draft of the same family"
        )


def _tokenizer_bytes(directory: Path) -> bytes:
    path = directory / _TOKENIZER
    return path.read_bytes() if path.is_file() else b""


def _fingerprint(directory: Path) -> str:
    """Of its tokenizer; empty where it has none, or one that takes torch to be read."""
    if not (directory / _TOKENIZER).is_file():
        return ""
    try:
        loaded = tokenizer.load(str(directory))
    except ModelLoadError:
        return ""
    return loaded.fingerprint if loaded else ""
