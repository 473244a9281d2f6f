"""A model on the devices that a config names: one runner, or a group of ranks behind one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from specwire.config.flags import flag_name
from specwire.config.models import EMBEDDED, adapter_directories
from specwire.config.own_methods import DRAFT_MODEL, LAYERS
from specwire.config.services import DraftConfig, ModelServiceConfig, VerifyConfig
from specwire.engine.boot import model_directory, resolve
from specwire.engine.device import Runner
from specwire.engine.model import encoder_decoder, memory, own
from specwire.engine.model.encoder_decoder import EncoderDecoderRunner
from specwire.engine.model.fingerprint import adapter_fingerprint
from specwire.engine.model.graphs import make_replay
from specwire.engine.model.loading import (
    describe,
    errors_naming,
    is_quantised,
    is_recurrent,
    load_adapters,
    load_model,
    read_config,
)
from specwire.engine.model.runner import ModelRunner
from specwire.errors import ModelLoadError
from specwire.rule.captured import CudaReplay


def make_runner(config: ModelServiceConfig, source: str) -> tuple[Runner, dict[str, Any]]:
    """Load the model on its devices; also returns its `loading.describe`.

    Raises:
        ModelLoadError: naming the model and the reason.
    """
    # A service's standard error is a log, and transformers' records belong into it like all others.
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    return _make_group(config, source) if config.tensor_parallel_size > 1 else _load_runner(config, source)


def _load_runner(config: ModelServiceConfig, source: str) -> tuple[Runner, dict[str, Any]]:
    device = memory.select_device(config.device)
    num_pages = memory.num_pages(config, device)
    replay = make_replay(config, device)
    own_dtype = _dtype(config.model, config.dtype, config.device)
    if _has_encoder(source, config):
        halves = encoder_decoder.load(source, dtype=own_dtype, device=str(device))
        served = EncoderDecoderRunner(halves, num_pages=num_pages, page_size=config.page_len)
        return served, encoder_decoder.describe(halves, source)
    learns = isinstance(config, DraftConfig) and config.learn
    model = load_model(source, dtype=own_dtype, device=str(device), packs=not learns)
    adapters = adapter_directories(config.lora_modules) if isinstance(config, VerifyConfig) else {}
    if adapters:
        load_adapters(model, adapters)
    # The compiler would look into layers that read which adapters a pass has.
    is_fixed = config.batch_invariant or config.own.source == LAYERS or bool(adapters)
    compiles = isinstance(replay, CudaReplay) and not is_fixed
    paged = partial(ModelRunner, page_size=config.page_len, compiles=compiles)
    draft = _load_draft(config, device) if isinstance(config, VerifyConfig) and config.draft_model else None
    if draft is not None and callable(num_pages):  # both have as many tokens
        one, of_both = paged(draft, num_pages=1), num_pages
        page_bytes = one.kv_bytes_per_token * config.page_len
        num_pages = lambda page, state: of_both(page + page_bytes, state + one.state_bytes)  # noqa: E731
    runner = own.make_runner(
        config,
        model_directory(source),
        model,
        num_pages=num_pages,
        replay=replay,
        batch_invariant=config.batch_invariant,
        compiles=compiles,
    )
    runner.warm()
    if isinstance(config, DraftConfig):
        runner.warm_chains()
    if draft is not None:
        runner.drafting = paged(draft, num_pages=runner.pool.num_pages, replay=replay)
        runner.drafting.warm()
        runner.drafting.warm_chains()
    fingerprints = {name: adapter_fingerprint(directory) for name, directory in adapters.items()}
    return runner, describe(model, source) | {"adapters": fingerprints}


def _load_draft(config: VerifyConfig, device: torch.device) -> Any:
    """The draft model that runs beside the target; a ModelLoadError names the flag."""
    source = resolve(config.draft_model, "draft")
    try:
        if _has_encoder(source):
            raise ModelLoadError(
                f"{source}: is an encoder-decoder, which drafts in a service of its own only"
            )
        dtype = _dtype(config.draft_model, config.draft_dtype, config.device)
        return load_model(source, dtype=dtype, device=str(device))
    except ModelLoadError as error:
        raise ModelLoadError(f"--draft-model {error}") from error


def _has_encoder(source: str, config: ModelServiceConfig | None = None) -> bool:
    """Whether it is an encoder-decoder.

    Raises:
        ModelLoadError: naming a flag of the config, if one is given, that does not combine with that, or with
            recurrent layers.
    """
    with errors_naming(source):
        found = read_config(source, may_encode=True)
    has_encoder = bool(found.is_encoder_decoder)
    if is_quantised(found) and isinstance(config, VerifyConfig) and config.lora_modules:
        raise ModelLoadError(f"{source}: has quantised weights, which are not served with --lora-modules")
    if config is not None and (has_encoder or is_recurrent(found)):
        _check_kind(config, source, "is an encoder-decoder" if has_encoder else "has recurrent layers")
    return has_encoder


def _check_kind(config: ModelServiceConfig, source: str, kind: str) -> None:
    drafts, is_model = flag_name(config.own.source), config.own.source == DRAFT_MODEL
    if is_model:
        drafts += "; its draft needs a service of its own (--draft-placement service)"
    refused = {
        drafts: config.own.source != "" and not (is_model and kind == "has recurrent layers"),
        "--batch-invariant": config.batch_invariant,
        "--tensor-parallel-size over 1": config.tensor_parallel_size > 1,
        "--lora-modules": kind != "has recurrent layers" and getattr(config, "lora_modules", "") != "",
    }
    if isinstance(config, DraftConfig):
        refused |= {"--inner": config.inner != "", "--learn": config.learn}
    for flag, is_given in refused.items():
        if is_given:
            raise ModelLoadError(f"{source}: {kind}, which is not served with {flag}")


def _make_group(config: ModelServiceConfig, source: str) -> tuple[Runner, dict[str, Any]]:
    _has_encoder(source, config)
    from specwire.engine.group.placement import require_ray

    require_ray(config.tensor_parallel_size)
    from specwire.engine.group.runner import GroupRunner
    from specwire.engine.group.sharding import check_shardable

    with errors_naming(source):  # checked before any rank starts
        check_shardable(read_config(source), config.tensor_parallel_size)
    runner = GroupRunner(config, source, _dtype(config.model, config.dtype, config.device))
    return runner, runner.description


def _dtype(model: str, dtype: str, device: str) -> str:
    """The embedded pair is stored in bfloat16, which is smaller, and runs in float32, faster on a CPU."""
    return "float32" if model == EMBEDDED and dtype == "auto" and device == "cpu" else dtype
