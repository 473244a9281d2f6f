"""`specwire.v1.VerifyService`: messages in, messages out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from specwire.engine.boot import ModelService
from specwire.engine.serving import SequenceSpans
from specwire.engine.streams import Limits
from specwire.rpc import listening
from specwire.rpc.wire import model as wire
from specwire.telemetry import tracing
from specwire.v1 import verify_pb2, verify_pb2_grpc
from verify_service.stream import VerifyStream

_METHOD = "specwire.v1.VerifyService/Verify"


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """One stream carries all sequences of a coordinator, whose KV caches are freed when it ends.

    Attributes:
        service: the loaded model; set before the first request.
    """

    service: ModelService

    def __init__(
        self, tracer: tracing.Tracing, *, trace_detail: bool = False, limits: Limits | None = None
    ) -> None:
        self._tracer = tracer
        self._trace_detail = trace_detail
        self._limits = limits or Limits()

    async def Verify(self, requests: AsyncIterator[verify_pb2.VerifyRequest], context: Any) -> None:  # noqa: N802
        caller = listening.caller(context)
        stream = VerifyStream(self.service, context.write, self._limits, caller, self._spans)
        await stream.serve(requests)

    def _spans(self, headers: Iterable[tuple[str, str]]) -> SequenceSpans:
        context = self._tracer.propagators.read(headers)
        return SequenceSpans(self._tracer, "verify", _METHOD, context, self._trace_detail)

    async def GetModelInfo(  # noqa: N802
        self, request: verify_pb2.VerifyServiceGetModelInfoRequest, context: Any
    ) -> verify_pb2.VerifyServiceGetModelInfoResponse:
        return verify_pb2.VerifyServiceGetModelInfoResponse(
            model=wire.model_info_to_proto(self.service.info), status=self.service.status()
        )

    async def GetTokenizer(  # noqa: N802
        self, request: verify_pb2.VerifyServiceGetTokenizerRequest, context: Any
    ) -> verify_pb2.VerifyServiceGetTokenizerResponse:
        return verify_pb2.VerifyServiceGetTokenizerResponse(page=self.service.files.page(request.offset))
