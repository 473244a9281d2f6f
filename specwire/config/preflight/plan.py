"""What a command is going to need, read off its config, and the check of all of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specwire.config.client import HttpConfig
from specwire.config.fields import next_address
from specwire.config.models import ADAPTER_CONFIG, NO_DRAFT, adapter_directories
from specwire.config.own_methods import DIR, OWN_METHODS
from specwire.config.preflight import machine, memory, models, pairs
from specwire.config.preflight.models import Model
from specwire.config.services import CoordinatorConfig, DraftConfig, ModelServiceConfig, VerifyConfig
from specwire.config.speculative import INNER_METHODS
from specwire.config.stack import StackConfig


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Everything that can be checked before a start.

    Attributes:
        addresses: to listen on, each with the names of what sets it.
        models: to be loaded.
        pair: of these, target and draft if their tokens have to be the same.
        tokenizers: to be loaded without a model, each with its field's name.
    """

    addresses: Sequence[machine.Listened]
    models: Sequence[Model] = ()
    pair: Sequence[Model] = ()
    tokenizers: Sequence[tuple[str, str]] = ()


def check(config: Any) -> None:
    """Check the config of `up`, `demo`, a service or the HTTP front; ConfigError says what to do."""
    needs = needs_of(config)
    machine.check_addresses(needs.addresses)
    for name, source in needs.tokenizers:
        if source:
            models.check_tokenizer(Model(name=name, source=source))
    for model in needs.models:
        if model.is_here:
            machine.check_device(model.device_name, model.device, model.num_devices)
    found = {model: files for model in needs.models if (files := models.find(model))}
    for files in found.values():
        models.check(files)
    memory.check([files for model, files in found.items() if model.is_here])
    if len(needs.pair) == 2 and all(model in found for model in needs.pair):
        pairs.check(*(found[model] for model in needs.pair))


@functools.singledispatch
def needs_of(config: Any) -> Needs:
    """The plan of a config."""
    raise TypeError(config)


@needs_of.register
def _(config: StackConfig) -> Needs:
    verify = config.verify()
    target = replace(_served(verify, config.replicas), name="target", device=config.device)
    beside = [replace(each, name="draft") for each in _beside(verify, target)]
    draft = Model(
        name="draft",
        source=config.draft_model,
        is_draft=True,
        dtype=config.draft_dtype,
        device_name="draft_device",
        device=config.draft_device,
        num_devices=config.replicas if config.draft_in_target else 1,
        num_kv_tokens=config.num_kv_tokens,
    )
    has_draft = config.draft_model != NO_DRAFT
    return Needs(
        addresses=[
            (("address",), config.address),
            (config.http_flags, config.http_address),
            *((("metrics_address",), each) for each in config.metrics_addresses),
        ],
        models=[
            *(target, *beside, *([draft] if has_draft else []), *_inner("draft", config.inner)),
            *_adapters(config.lora_modules, target),
        ],
        pair=[target, draft] if has_draft and not config.target_tokenizer else [],
    )


@needs_of.register
def _(config: VerifyConfig) -> Needs:
    names = ("address", "metrics_address")
    given = {name: getattr(config, name) for name in names if getattr(config, name)}
    addresses = [
        ((name,), next_address(name, address, n))
        for name, address in given.items()
        for n in range(config.replicas)
    ]
    target = _served(config, config.replicas)
    drafts = []
    if config.draft_model:
        named = replace(target, name="draft_model", source=config.draft_model, dtype=config.draft_dtype)
        drafts = [replace(named, is_draft=True, max_model_len=0)]
    models = [target, *drafts, *_beside(config, target), *_adapters(config.lora_modules, target)]
    return Needs(addresses=addresses, models=models, pair=[target, *drafts])


@needs_of.register
def _(config: DraftConfig) -> Needs:
    return Needs(
        addresses=[(("address",), config.address), (("metrics_address",), config.metrics_address)],
        models=[_served(config), *_inner("inner", config.inner)],
        tokenizers=[("target_tokenizer", config.target_tokenizer)],
    )


@needs_of.register
def _(config: CoordinatorConfig | HttpConfig) -> Needs:
    metrics = [next_address("metrics_address", config.metrics_address, n) for n in range(config.workers)]
    addresses = [(("address",), config.address), *((("metrics_address",), each) for each in metrics)]
    return Needs(addresses=addresses, tokenizers=[("tokenizer", config.tokenizer)])


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
