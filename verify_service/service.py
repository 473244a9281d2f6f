"""One verify service: model, engine and server assembled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from specwire.config.own_methods import DFLASH, DRAFT_MODEL, EAGLE3, HEADS, LAYERS, MTP
from specwire.config.services import VerifyConfig
from specwire.engine import boot
from specwire.engine import metrics as engine_metrics
from specwire.engine.boot import ModelService
from specwire.engine.streams import Limits
from specwire.rpc.server import Server
from specwire.telemetry import endpoint, tracing
from specwire.v1 import verify_pb2, verify_pb2_grpc
from verify_service.draft_model import ModelDrafts
from verify_service.grown import GrownDrafts
from verify_service.own import ForcedDrafts, OwnDrafts
from verify_service.paged import BlockDrafts, Eagle3Drafts, LayersDrafts, PagedDrafts
from verify_service.servicer import VerifyServicer
from verify_service.verifier import VerifyDecider


@contextlib.asynccontextmanager
async def serving(config: VerifyConfig) -> AsyncIterator[str]:
    """A running service; yields its `HOST:PORT`, and shuts down gracefully.

    It listens before the model is loaded: until then, coordinators are told to wait.

    Raises:
        ModelLoadError: the model cannot be served.
        ConfigError: an address cannot be bound.
    """
    async with contextlib.AsyncExitStack() as stack:
        tracer = tracing.configure("specwire-verify")
        stack.callback(tracer.shutdown)
        server = Server(config, [verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name])
        servicer = VerifyServicer(tracer, trace_detail=config.trace_detail, limits=Limits(server.drain))
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
        address = await server.start(is_loading=True)
        stack.push_async_callback(server.stop)  # where loading fails
        decider = VerifyDecider()
        # The loop's own threads live as long as it does, and children end with the thread that started them.
        service = servicer.service = await asyncio.to_thread(boot.start, config, "verify", decider)
        stack.callback(service.close)
        if load := METHODS.get(config.own.source):
            decider.drafts = await asyncio.to_thread(load, config, service)
        elif service.info.grammars:
            decider.drafts = ForcedDrafts()
        group = engine_metrics.group(service, "verify")
        await stack.enter_async_context(
            endpoint.serving(config.metrics_address, [group], tracer, "verify", config.metrics_names)
        )
        stack.push_async_callback(server.stop)  # metrics can be read until the last request has ended
        await server.loaded()
        await stack.enter_async_context(service.watched(server.set_serving))
        yield address


METHODS: Mapping[str, Callable[[VerifyConfig, ModelService], OwnDrafts]] = {
    HEADS: GrownDrafts.load,
    LAYERS: LayersDrafts.load,
    MTP: PagedDrafts.load,
    DFLASH: BlockDrafts.load,
    EAGLE3: Eagle3Drafts.load,
    DRAFT_MODEL: ModelDrafts.load,
}
"""What the target proposes with, by its source. A ModelLoadError names the flag and the reason."""
