"""Health of a service: `specwire health`, for probes that need TLS."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.config.client import ClientConfig
from specwire.config.security.tls import Credentials
from specwire.errors import ServiceUnavailableError
from specwire.rpc import statuses
from specwire.rpc.channel import open_channel
from specwire.rpc.connecting import CLIENT, explain

SERVING = "SERVING"


async def status(settings: ClientConfig, service: str) -> str:
    """Its `grpc.health.v1` status: SERVING, NOT_SERVING or UNKNOWN.

    Args:
        service: full name, as in `specwire.v1.DraftService`; empty for all services of the process.

    Raises:
        SpecwireError: no answer, or no such service.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    async with open_channel(settings.server, credentials=Credentials(**settings.credentials)) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=settings.timeout_s)
        except grpc.RpcError as error:
            ours = statuses.from_rpc_error(error)
            why = explain(str(ours), settings.server, CLIENT)
            raise (ServiceUnavailableError(why) if why else ours) from None
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
