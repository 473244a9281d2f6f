"""One coordinator: peers, tokenizer and server put together."""

from __future__ import annotations

from coordinator.peers import DraftPeer, VerifyPeer
from coordinator.servicer import GenerationServicer
from specwire import embedded, rpc, tokenizer, tracing
from specwire.config import EMBEDDED, CoordinatorConfig
from specwire.v1 import generation_pb2, generation_pb2_grpc


async def serve(config: CoordinatorConfig) -> None:
    """Serve until a signal.

    Raises:
        ServiceUnavailableError: the verify service is not there in time.
        HandshakeError: draft and target do not fit each other.
        ConfigError: the address cannot be bound.
    """
    verify = VerifyPeer(config.verify_address, config.connect_timeout_s)
    await verify.connect()
    draft = DraftPeer(config.draft_address, verify.info)
    await draft.connect()
    text = _load_tokenizer(config.tokenizer or verify.info.tokenizer_source)
    tracer = tracing.configure("specwire-coordinator")
    server = rpc.Server(config, [generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name])
    servicer = GenerationServicer(config, verify, draft, text, tracer)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server.grpc)
    await rpc.serve_until_signal(server)
    await draft.close()
    await verify.close()
    tracer.shutdown()


def _load_tokenizer(source: str) -> tokenizer.Tokenizer | None:
    if not source:
        return None
    return tokenizer.load(embedded.TARGET_DIR if source == EMBEDDED else source)
