"""One draft service: model, engine and server put together."""

from __future__ import annotations

from draft_service.drafter import Drafter
from draft_service.servicer import DraftServicer
from specwire import rpc, tracing
from specwire.config import DraftConfig
from specwire.engine import boot
from specwire.v1 import draft_pb2, draft_pb2_grpc


async def serve(config: DraftConfig) -> None:
    """Serve until a signal.

    Raises:
        ModelLoadError: the model cannot be served.
        ConfigError: the address cannot be bound.
    """
    service = boot.start(config, "draft", Drafter(config).consume)
    tracer = tracing.configure("specwire-draft")
    server = rpc.Server(config, [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name])
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(service, tracer), server.grpc)
    await rpc.serve_until_signal(server)
    service.engine.close()
    tracer.shutdown()
