"""One draft service: model, engine and server assembled."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from draft_service import learner as learning
from draft_service import pairing
from draft_service.drafter import DraftDecider
from draft_service.inner import hierarchy as inner
from draft_service.servicer import DraftServicer
from specwire.config.services import DraftConfig
from specwire.core import Learning
from specwire.engine import boot
from specwire.engine import metrics as engine_metrics
from specwire.engine.streams import Limits
from specwire.rpc.server import Server
from specwire.telemetry import endpoint, tracing
from specwire.telemetry.metrics import Group
from specwire.v1 import draft_pb2, draft_pb2_grpc


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
        shared = pairing.shared_vocabulary(config)
        hierarchy = inner.chosen(config)
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
            stack.callback(hierarchy.close)
            service = hierarchy.described(service)
        learner = learning.start(config, service)
        stack.callback(learning.close, config, service, learner)
        if shared is not None:
            service = pairing.described(service, shared)
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
