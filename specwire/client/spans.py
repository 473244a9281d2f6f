"""The client's span of a generation: from the request to the completion, a failure or a cancellation."""

from __future__ import annotations

import time

from specwire.completion import Chunk, Completion
from specwire.errors import RequestCancelledError
from specwire.telemetry import semantics
from specwire.telemetry.propagation import TraceContext
from specwire.telemetry.tracing import Attributes, SpanKind, Tracing, described, error_type
from specwire.v1 import generation_pb2

_METHOD = f"{generation_pb2.DESCRIPTOR.services_by_name['GenerationService'].full_name}/Generate"


class GenerationSpan:
    """What a generation's client sees of it; `context` is to be sent with its calls."""

    def __init__(
        self,
        tracer: Tracing,
        request: generation_pb2.GenerateRequest,
        address: str,
        parent: TraceContext,
        request_id: str,
    ) -> None:
        is_chat = request.WhichOneof("prompt") == "messages"
        operation = semantics.OPERATION_CHAT if is_chat else semantics.OPERATION_TEXT_COMPLETION
        attributes: Attributes | None = None
        if tracer.enabled:
            attributes = {
                semantics.GEN_AI_OPERATION_NAME: operation,
                semantics.GEN_AI_PROVIDER_NAME: semantics.PROVIDER,
                semantics.GEN_AI_REQUEST_STREAM: True,
                semantics.RPC_SYSTEM_NAME: semantics.GRPC,
                semantics.RPC_METHOD: _METHOD,
                semantics.REQUEST_ID: request_id or None,
                **semantics.server(address),
            }
        self._span = tracer.span(operation, kind=SpanKind.CLIENT, parent=parent, attributes=attributes)
        self.context = self._span.context
        self._began_s = time.monotonic()
        self._first_chunk_s: float | None = None
        self._is_complete = False

    def received(self, chunk: Chunk) -> None:
        if self._first_chunk_s is None and chunk.tokens:
            self._first_chunk_s = time.monotonic() - self._began_s

    def moved(self, address: str, why: Exception) -> None:
        """Another coordinator is asked."""
        self._span.event(
            "asked_elsewhere", {**semantics.server(address), semantics.ERROR_TYPE: error_type(why)}
        )

    def completed(self, completion: Completion) -> None:
        self._is_complete = True
        self._span.set(
            {
                semantics.RPC_RESPONSE_STATUS_CODE: "OK",
                semantics.GEN_AI_RESPONSE_FINISH_REASONS: [completion.finish_reason.value],
                semantics.GEN_AI_USAGE_INPUT_TOKENS: completion.usage.prompt_tokens,
                semantics.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: completion.usage.cached_tokens,
            }
        )

    def failed(self, error: BaseException) -> None:
        """The generation has failed, or its caller's task is cancelled."""
        self._span.fail(error_type(error), described(error))

    def end(self, num_tokens: int) -> None:
        """The caller has left the stream; one that is not complete is cancelled."""
        if not self._is_complete:
            self.failed(RequestCancelledError("the stream was left before its end"))
        self._span.set(
            {
                semantics.GEN_AI_USAGE_OUTPUT_TOKENS: num_tokens,
                semantics.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: self._first_chunk_s,
            }
        )
        self._span.end()
