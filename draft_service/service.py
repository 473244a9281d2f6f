"""One draft service: model, engine and server assembled."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator

from draft_service import learner as learning
from draft_service.drafter import DraftDecider
from draft_service.inner.hierarchy import Hierarchy
from draft_service.servicer import DraftServicer
from draft_service.vocabulary import SharedVocabulary
from specwire.config.models import EMULATED
from specwire.config.services import DraftConfig
from specwire.core import Learning, ModelInfo
from specwire.engine import boot
from specwire.engine import metrics as engine_metrics
from specwire.engine.streams import Limits
from specwire.errors import ModelLoadError, UnsupportedError
from specwire.rpc.server import Server
from specwire.telemetry import endpoint, tracing
from specwire.telemetry.metrics import Group
from specwire.text import tokenizer
from specwire.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)

_MIN_SHARED_TEXT = 0.1
"""A draft that shares fewer of a text's tokens with its target is refused."""


@contextlib.asynccontextmanager
async def serving(config: DraftConfig) -> AsyncIterator[str]:
    """A running service; yields its `HOST:PORT`, and shuts down gracefully.

    Raises:
        ModelLoadError: the model cannot be served.
        ConfigError: an address cannot be bound.
    """
    async with contextlib.AsyncExitStack() as stack:
        tracer = tracing.configure("specwire-draft")
        stack.callback(tracer.shutdown)
        shared = _shared_vocabulary(config)
        hierarchy = Hierarchy(config) if config.inner else None
        decider = DraftDecider(config, shared)
        service = boot.start(
            config,
            "draft",
            decider,
            vocab_size=shared.target_size if shared else None,
            hook=hierarchy,
            target_tokenizer=shared.target.tokenizer if shared else None,
        )
        if hasattr(service.runner, "decode") and not config.least_pass_ms:  # a chain takes no paced passes
            decider.runner = service.runner
        if hierarchy is not None:
            stack.callback(hierarchy.drafter.close)
        learner = learning.start(config, service)
        stack.callback(learning.close, config, service, learner)
        service = dataclasses.replace(service, info=_described(service.info, hierarchy, shared))
        group = engine_metrics.group(service, "draft")
        learnt = Group(learning.TABLE, lambda: learner.learning if learner else Learning(), group.fixed)
        await stack.enter_async_context(
            endpoint.serving(config.metrics_address, [group, learnt], tracer, "draft", config.metrics_names)
        )
        server = Server(config, [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name])
        stack.push_async_callback(server.stop)  # metrics can be read until the last request has ended
        draft_pb2_grpc.add_DraftServiceServicer_to_server(
            DraftServicer(
                service,
                tracer,
                max_outcomes=config.max_outcomes,
                max_support=config.max_support,
                trace_detail=config.trace_detail,
                limits=Limits(server.drain),
                shared=shared,
                hierarchy=hierarchy,
                learner=learner,
            ),
            server.grpc,
        )
        address = await server.start()
        await stack.enter_async_context(service.watched(server.set_serving))
        yield address


def _shared_vocabulary(config: DraftConfig) -> SharedVocabulary | None:
    """What draft and target share; None if `target_tokenizer` names none, or the draft's own.

    Raises:
        ModelLoadError: one has no tokenizer, or one whose tokens' text is not known, or they share next to
            nothing.
    """
    if not config.target_tokenizer:
        return None
    flag = f"--target-tokenizer {config.target_tokenizer}"
    target = _tokenizer(boot.resolve(config.target_tokenizer, "verify"), flag)
    draft = _tokenizer(boot.resolve(config.model, "draft"), f"--model {config.model}")
    if target.fingerprint == draft.fingerprint:
        return None
    try:
        shared = SharedVocabulary(target, draft)
    except UnsupportedError as error:
        raise ModelLoadError(f"{flag}: {error}") from error
    if shared.share_of_text < _MIN_SHARED_TEXT:
        raise ModelLoadError(
            f"{flag}: {config.model}: has {shared.share:.1%} of the target's tokens, and "
            f"{shared.share_of_text:.1%} of those of a text; "
            f"at least {_MIN_SHARED_TEXT:.0%} of the latter are needed"
        )
    return shared


def _tokenizer(source: str, name: str) -> tokenizer.Tokenizer:
    found = None if source.startswith(EMULATED) else tokenizer.load(source)
    if found is None:
        raise ModelLoadError(f"{name}: has no tokenizer, without which no vocabularies can be compared")
    return found


def _described(info: ModelInfo, hierarchy: Hierarchy | None, shared: SharedVocabulary | None) -> ModelInfo:
    """What the handshake says: what guesses for the draft, and what it shares with the target.

    Raises:
        ModelLoadError: the tokenizer has tokens that the model lacks, or it is an encoder-decoder.
    """
    if hierarchy is not None:
        info = dataclasses.replace(info, inner=hierarchy.name)
    if shared is None:
        return info
    name, num_tokens = info.name, len(shared.draft.texts)
    if info.has_encoder:
        raise ModelLoadError(
            f"--model {name}: is an encoder-decoder, which is not served with --target-tokenizer"
        )
    if num_tokens > info.vocab_size:
        raise ModelLoadError(f"--model {name}: {info.vocab_size} tokens, and {num_tokens} in its tokenizer")
    percents = 100 * shared.share, 100 * shared.share_of_text
    log.info("%s has %.1f %% of the target's tokens, and %.1f %% of those of a text", name, *percents)
    return dataclasses.replace(
        info,
        target_tokenizer_fingerprint=shared.target.tokenizer.fingerprint,
        shared_vocab=shared.share,
        shared_text=shared.share_of_text,
    )
