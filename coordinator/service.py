"""A running coordinator: peers, tokenizer and server put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from coordinator import metrics
from coordinator.peers.handshake import DraftPool, VerifyPool
from coordinator.servicer import GenerationServicer
from specwire import embedded
from specwire.config.models import EMBEDDED
from specwire.config.services import CoordinatorConfig
from specwire.errors import ConfigError
from specwire.rpc.server import Server
from specwire.rpc.wire import tokenizer_files
from specwire.rpc.wire.tokenizer_files import TokenizerFiles
from specwire.telemetry import endpoint, tracing
from specwire.telemetry.logs import NOTICE
from specwire.telemetry.metrics import Group
from specwire.text import tokenizer
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)

_AT_ONCE_S = 0.5
"""Services that are there answer within this time, and nothing is said of a wait."""
_AGAIN_S = 10.0


@contextlib.asynccontextmanager
async def serving(config: CoordinatorConfig) -> AsyncIterator[str]:
    """Run a coordinator, or one worker of several; yields its `HOST:PORT`, and ends gracefully.

    Raises:
        ServiceUnavailableError: no verify service answered in time.
        HandshakeError: draft and target are incompatible, replicas differ, or the target has no tokenizer to
            send.
        ConfigError: the address cannot be bound, or a chat template is of no use.
    """
    async with contextlib.AsyncExitStack() as stack:
        tracer = tracing.configure("specwire-coordinator")
        stack.callback(tracer.shutdown)
        verify = VerifyPool(config.verify_address, config.peer_credentials)
        stack.push_async_callback(verify.close)
        async with _waiting_for(config, verify):
            await verify.connect(config.connect_timeout_s)
        draft = DraftPool(config, verify.info)
        stack.push_async_callback(draft.close)
        await draft.connect()
        _log_found(config, verify, draft)
        files, loaded = await _tokenizer(config, verify)
        name = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
        server = Server(config, [name], serves_clients=True, shares_port=config.workers > 1)
        servicer = GenerationServicer(config, verify, draft, loaded, tracer, files=files)
        group = Group(metrics.TABLE, lambda: servicer, {"model_name": verify.info.name})
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
        server.interceptor.on_refused = servicer.refused
        await stack.enter_async_context(
            endpoint.serving(config.metrics_address, [group], tracer, "coordinator", config.metrics_names)
        )
        stack.push_async_callback(server.stop)
        yield await server.start()


async def _tokenizer(
    config: CoordinatorConfig, verify: VerifyPool
) -> tuple[TokenizerFiles, Tokenizer | None]:
    """The files that `--tokenizer` names, or those of the target; and what is loaded from them."""
    if config.tokenizer:
        source = embedded.TARGET_DIR if config.tokenizer == EMBEDDED else config.tokenizer
        files = tokenizer_files.read(source)
    else:
        files = await verify.tokenizer(config.connect_timeout_s)
    path = config.chat_template
    template = tokenizer.read_chat_template(path) if path else ""
    loaded = files.load(config.tokenizer or verify.info.name, chat_template=template)
    if path and loaded is None:
        raise ConfigError(f"--chat-template {path}: the target has no tokenizer")
    return files, loaded


@contextlib.asynccontextmanager
async def _waiting_for(config: CoordinatorConfig, verify: VerifyPool) -> AsyncIterator[None]:
    """Say now and then what is waited for while the body runs."""

    async def say() -> None:
        await asyncio.sleep(_AT_ONCE_S)
        draft = f", draft at {config.draft_address}" if config.draft_address else ""
        patience = f"for {config.connect_timeout_s:g} s, and as long as it loads its model"
        log.log(NOTICE, "waiting for verify at %s%s, %s", config.verify_address, draft, patience)
        while True:
            await asyncio.sleep(_AGAIN_S)
            log.log(NOTICE, "still waiting: %s", verify.unavailable)

    saying = asyncio.create_task(say())
    try:
        yield
    finally:
        saying.cancel()


def _log_found(config: CoordinatorConfig, verify: VerifyPool, draft: DraftPool) -> None:
    """Say what serves, and how requests are served that leave it open."""
    log.log(NOTICE, "target %s at %s", verify.info.summary, config.verify_address)
    if draft.info is not None:
        log.log(NOTICE, "draft %s at %s", draft.info.summary, config.draft_address)
    elif config.draft_address:
        log.log(NOTICE, "no draft yet at %s: decoding plainly until it serves", config.draft_address)
    given = config.own_draft.source if config.own_draft else config.text_draft and config.text_draft.method
    log.log(
        NOTICE,
        "rule %s; draft tokens a round %s%s",
        config.rule,
        config.num_draft_tokens,
        f"; drafts by {given}" if given else "",
    )
