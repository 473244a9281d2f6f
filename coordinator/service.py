"""A running coordinator: peers, tokenizer and server put together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from coordinator import starting
from coordinator.peers.addresses import Names
from coordinator.peers.handshake import DraftPool, VerifyPool
from coordinator.servicer import GenerationServicer
from coordinator.workers.worker import Worker
from specwire import embedded, tokenizer
from specwire.config.models import EMBEDDED
from specwire.config.services import CoordinatorConfig
from specwire.errors import ConfigError
from specwire.rpc.server import Server
from specwire.telemetry import endpoint, tracing
from specwire.telemetry.metrics import Group
from specwire.v1 import generation_pb2, generation_pb2_grpc

_SYSTEM_NAMES = Names()


@contextlib.asynccontextmanager
async def serving(
    config: CoordinatorConfig, names: Names = _SYSTEM_NAMES, worker: Worker | None = None
) -> AsyncIterator[str]:
    """Run a coordinator, or one of its workers; yields its `HOST:PORT`, and ends gracefully.

    Args:
        names: how the names of `dns:///NAME:PORT` are resolved.
        worker: None where this process is the whole coordinator.

    Raises:
        ServiceUnavailableError: no verify service answered in time.
        HandshakeError: draft and target are incompatible, or replicas differ.
        ConfigError: the address cannot be bound, or a chat template is of no use.
    """
    async with contextlib.AsyncExitStack() as stack:
        tracer = tracing.configure("specwire-coordinator")
        stack.callback(tracer.shutdown)
        credentials = config.peer_credentials
        verify = VerifyPool(config.verify_address, names, credentials)
        stack.push_async_callback(verify.close)
        async with starting.waiting_for(config, verify):
            await verify.connect(config.connect_timeout_s)
        draft = DraftPool(
            config.draft_address,
            names,
            credentials,
            verify.info,
            use_heterogeneous_vocab=config.use_heterogeneous_vocab,
        )
        stack.push_async_callback(draft.close)
        await draft.connect()
        if worker is None:
            starting.log_found(config, verify, draft)
        loaded = _load_tokenizer(config, verify.info.tokenizer_source)
        name = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
        server = Server(config, [name], shares_port=worker is not None)
        servicer = GenerationServicer(config, verify, draft, loaded, tracer, worker)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
        groups: list[Group[Any]] = [servicer.metrics(), endpoint.spans(tracer, "coordinator")]
        if worker is not None:
            worker.begin(servicer, groups)
        else:
            await stack.enter_async_context(endpoint.serving_groups(config, groups))
        stack.push_async_callback(server.stop)
        yield await server.start()


def _load_tokenizer(config: CoordinatorConfig, of_target: str) -> tokenizer.Tokenizer | None:
    source, path = config.tokenizer or of_target, config.chat_template
    template = tokenizer.read_chat_template(path) if path else ""
    directory = embedded.TARGET_DIR if source == EMBEDDED else source
    loaded = tokenizer.load(directory, chat_template=template) if source else None
    if path and loaded is None:
        raise ConfigError(f"--chat-template {path}: the target has no tokenizer")
    return loaded
