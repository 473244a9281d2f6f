"""One verify service: model, engine and server put together."""

from __future__ import annotations

from specwire import rpc, tracing
from specwire.config import VerifyConfig
from specwire.engine import boot
from specwire.v1 import verify_pb2, verify_pb2_grpc
from verify_service import verifier
from verify_service.servicer import VerifyServicer


async def serve(config: VerifyConfig) -> None:
    """Serve until a signal.

    Raises:
        ModelLoadError: the model cannot be served.
        ConfigError: the address cannot be bound.
    """
    service = boot.start(config, "verify", verifier.consume)
    tracer = tracing.configure("specwire-verify")
    server = rpc.Server(config, [verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name])
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(VerifyServicer(service, tracer), server.grpc)
    await rpc.serve_until_signal(server)
    service.engine.close()
    tracer.shutdown()
