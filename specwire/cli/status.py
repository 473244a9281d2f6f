"""What services say of themselves: `specwire health`, for probes that need TLS, and `specwire status`."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.config.client import ClientConfig
from specwire.config.security.tls import Credentials
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.rpc import statuses
from specwire.rpc.channel import open_channel
from specwire.rpc.connecting import CLIENT, explain
from specwire.v1.generation_pb2 import ReplicaStatus

SERVING = "SERVING"


async def health(settings: ClientConfig, service: str) -> str:
    """Its `grpc.health.v1` status: SERVING, NOT_SERVING or UNKNOWN; raises SpecwireError if there is none.

    Args:
        service: full name, as in `specwire.v1.DraftService`; empty for all services of the process.
    """
    if "," in settings.server:
        raise ConfigError(f"--server {settings.server}: names several; the health of one is asked for")
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


def show(settings: ClientConfig) -> str:
    """One fact a line; raises SpecwireError if the server does not answer."""
    from specwire.client.client import Client  # which probes of the health do not wait for

    with Client(settings.server, timeout_s=settings.timeout_s, **settings.credentials) as client:
        target, draft = client.get_model_info()
        status = client.get_status()
    why = target.why_not_reproducible
    own = target.own_source and f"the target's own {target.own_source}"
    replicas = {"verify": status.verify_replicas, "draft": status.draft_replicas}
    lines = {
        "target": target.summary,
        "draft": own or status.draft_unavailable or (draft.summary if draft else "none"),
        "generations": f"{status.num_running} running, {status.num_waiting} waiting, "
        f"{status.num_finished} finished",
        **{f"{role} at {each.address}": _state(each) for role, those in replicas.items() for each in those},
        "reproducible": f"false: {why}" if why else "true, at temperature 0 or under rule gumbel",
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())


def _state(replica: ReplicaStatus) -> str:
    """Whether it is used, and how often it was not."""
    streams = f"{replica.num_streams} streams, {replica.num_other_streams} of other coordinators"
    state = f"not available: {replica.unavailable}" if replica.unavailable else streams
    return f"{state}; lost {replica.num_lost} times"
