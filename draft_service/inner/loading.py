"""From `--inner` to an inner drafter, checked at start."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from draft_service.drafter import DraftDecider
from draft_service.inner.hierarchy import Hierarchy
from draft_service.inner.model import ModelDrafter
from draft_service.inner.stream import InnerDrafter
from draft_service.inner.text import TextDrafter
from specwire.config.services import DraftConfig
from specwire.config.speculative import INNER_METHODS
from specwire.engine import boot
from specwire.errors import ModelLoadError
from specwire.text.tokenizer import load as load_tokenizer


def hierarchy(config: DraftConfig) -> Hierarchy | None:
    """What `--inner` asks for, to be loaded; None without."""
    inner = config.inner
    if not inner:
        return None
    name = Path(inner).name if Path(inner).exists() else inner
    return Hierarchy(name, partial(_load, config))


def _load(config: DraftConfig, vocab_size: int) -> InnerDrafter:
    """The drafter, on the thread that will run it.

    Raises:
        ModelLoadError: the model cannot be loaded, or its tokenizer is not the draft's.
    """
    if config.inner in INNER_METHODS:
        return TextDrafter(config.inner)
    source = boot.resolve(config.inner, "draft")
    _check_tokenizers(config, source)
    own = dataclasses.replace(
        config,
        model=config.inner,
        inner="",
        batch_invariant=False,
        kv_cache_memory=0.0,
        gpu_memory_utilization=0.0,
        least_pass_ms=0.0,
    )
    from specwire.engine import models  # takes seconds to import, and text needs none of it

    try:
        runner, description = models.make_runner(own, source)
    except ModelLoadError as error:
        raise ModelLoadError(f"--inner {error}") from error
    return ModelDrafter(
        runner,
        DraftDecider(own),
        context_len=min(description["context_len"], own.num_kv_tokens),
        vocab_limit=vocab_size,
        max_prefill_tokens=own.max_prefill_tokens,
    )


def _check_tokenizers(config: DraftConfig, source: str) -> None:
    found = map(load_tokenizer, (source, boot.resolve(config.model, "draft")))
    ours, theirs = (tokenizer.fingerprint if tokenizer else "" for tokenizer in found)
    if ours != theirs:
        raise ModelLoadError(f"--inner {config.inner}: its tokenizer is not that of --model {config.model}")
