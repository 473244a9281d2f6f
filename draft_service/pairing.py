"""A draft whose tokenizer is not the target's: what both share, checked at start."""

from __future__ import annotations

import dataclasses
import logging

from draft_service.vocabulary import SharedVocabulary
from specwire.config.models import EMULATED
from specwire.config.services import DraftConfig
from specwire.engine import boot
from specwire.engine.boot import ModelService
from specwire.errors import ModelLoadError, UnsupportedError
from specwire.text import tokenizer

log = logging.getLogger(__name__)


def shared_vocabulary(config: DraftConfig) -> SharedVocabulary | None:
    """What draft and target share; None if `target_tokenizer` names none, or the draft's own.

    Raises:
        ModelLoadError: one has no tokenizer, or one whose tokens' text is not known, or they share next to
            nothing.
    """
    if not config.target_tokenizer:
        return None
    target = _loaded(
        boot.resolve(config.target_tokenizer, "verify"), f"--target-tokenizer {config.target_tokenizer}"
    )
    draft = _loaded(boot.resolve(config.model, "draft"), f"--model {config.model}")
    if target.fingerprint == draft.fingerprint:
        return None
    try:
        shared = SharedVocabulary(target, draft)
    except UnsupportedError as error:
        raise ModelLoadError(f"--target-tokenizer {config.target_tokenizer}: {error}") from error
    shared.check(f"--target-tokenizer {config.target_tokenizer}: {config.model}")
    return shared


def described(service: ModelService, shared: SharedVocabulary) -> ModelService:
    """The service, with what it shares in its handshake and its log.

    Raises:
        ModelLoadError: the tokenizer has tokens that the model lacks, or it is an encoder-decoder.
    """
    num_tokens, info = len(shared.draft.texts), service.info
    if info.has_encoder:
        raise ModelLoadError(
            f"--model {info.name}: is an encoder-decoder, which is not served with --target-tokenizer"
        )
    if num_tokens > info.vocab_size:
        raise ModelLoadError(
            f"--model {info.name}: {info.vocab_size} tokens, and {num_tokens} in its tokenizer"
        )
    log.info(
        "%s has %.1f %% of the target's tokens, and %.1f %% of those of a text",
        info.name,
        100 * shared.share,
        100 * shared.share_of_text,
    )
    info = dataclasses.replace(
        info,
        target_tokenizer_fingerprint=shared.target.tokenizer.fingerprint,
        shared_vocab=shared.share,
        shared_text=shared.share_of_text,
    )
    return dataclasses.replace(service, info=info)


def _loaded(source: str, name: str) -> tokenizer.Tokenizer:
    found = None if source.startswith(EMULATED) else tokenizer.load(source)
    if found is None:
        raise ModelLoadError(f"{name}: has no tokenizer, without which no vocabularies can be compared")
    return found
