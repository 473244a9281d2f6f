"""`specwire.v1.VerifyService`: messages in, messages out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from specwire import tree
from specwire.core import IntArray, SamplingParams, Verdict
from specwire.engine import serving
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.engine.serving import StreamSpans
from specwire.errors import InvalidRequestError, UnsupportedError
from specwire.estimate import clock
from specwire.rpc import listening
from specwire.telemetry import tracing
from specwire.v1 import verify_pb2, verify_pb2_grpc
from specwire.wire import model as wire
from verify_service.verifier import VerifyJob

_METHOD = "specwire.v1.VerifyService/Verify"


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """One stream is one sequence; its KV cache is freed when the stream ends, for whatever reason."""

    def __init__(self, service: ModelService, tracer: tracing.Tracing, *, trace_detail: bool = False) -> None:
        self._service = service
        self._tracer = tracer
        self._trace_detail = trace_detail

    async def Verify(self, requests: AsyncIterator[verify_pb2.VerifyRequest], context: Any) -> None:  # noqa: N802
        spans = StreamSpans.of(
            self._tracer, "verify", _METHOD, listening.metadata(context), is_detailed=self._trace_detail
        )
        with contextlib.ExitStack() as stack:
            sequence: TokenSequence | None = None
            async for request in requests:
                received_ns = clock.stopwatch_ns()
                if sequence is None:
                    sequence = stack.enter_context(self._service.opened(request.open))
                elif request.HasField("open"):
                    raise InvalidRequestError("open", "set", "only the first request of a stream may open it")
                with spans.serving(request.traceparent) as span:
                    job = self._job(sequence, request)
                    verdict = await self._service.engine.run(job, extra_len=len(job.draft_token_ids))
                    response = self._response(request, job, verdict, received_ns)
                    spans.finish(span, job, response.timings)
                    await context.write(response)

    async def GetModelInfo(  # noqa: N802
        self, request: verify_pb2.VerifyServiceGetModelInfoRequest, context: Any
    ) -> verify_pb2.VerifyServiceGetModelInfoResponse:
        return verify_pb2.VerifyServiceGetModelInfoResponse(
            model=wire.model_info_to_proto(self._service.info), status=self._service.status()
        )

    def _job(self, sequence: TokenSequence, request: verify_pb2.VerifyRequest) -> VerifyJob:
        parents = self._parents(request, sequence.params)
        wire.check_num_draft_tokens("draft_token_ids", len(request.draft_token_ids))
        vocab_size = self._service.info.vocab_size
        for i, token_id in enumerate(request.draft_token_ids):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"draft_token_ids[{i}]", token_id, f"is outside the vocabulary of {vocab_size}"
                )
        return VerifyJob(
            sequence,
            request.base_len,
            list(request.token_ids),
            draft_token_ids=list(request.draft_token_ids),
            parents=parents,
            supports=_supports(request, sequence.params, vocab_size),
        )

    def _parents(self, request: verify_pb2.VerifyRequest, params: SamplingParams) -> list[int]:
        parents = tree.checked_parents(request.parent_indices, len(request.draft_token_ids))
        if parents and not self._service.info.trees:
            raise UnsupportedError("parent_indices", parents, "this service verifies chains only")
        if parents and not params.matches_tokens:
            raise UnsupportedError("parent_indices", parents, f"not under rule {params.rule}")
        return parents

    def _response(
        self, request: verify_pb2.VerifyRequest, job: VerifyJob, verdict: Verdict, received_ns: int
    ) -> verify_pb2.VerifyResponse:
        response = wire.verdict_to_proto(verdict)
        response.request_id = request.request_id
        response.incarnation = self._service.info.incarnation
        response.num_cached_tokens = job.num_cached_tokens
        response.load.CopyFrom(wire.load_to_proto(self._service.engine.load(job)))
        response.timings.CopyFrom(serving.timings(job, received_ns))
        return response


def _supports(request: verify_pb2.VerifyRequest, params: SamplingParams, vocab_size: int) -> list[IntArray]:
    """One support per draft token, checked: unknown or repeated ids would make the residual wrong."""
    wanted = 0 if params.matches_tokens else len(request.draft_token_ids)
    if len(request.support_token_ids) != wanted:
        raise InvalidRequestError("support_token_ids", len(request.support_token_ids), f"must be {wanted}")
    supports = []
    for i, data in enumerate(request.support_token_ids):
        name = f"support_token_ids[{i}]"
        token_ids = wire.ids_from_bytes(data, name)
        if len(token_ids) and token_ids.max() >= vocab_size:
            raise InvalidRequestError(
                name, int(token_ids.max()), f"is outside the vocabulary of {vocab_size}"
            )
        if len(np.unique(token_ids)) != len(token_ids):
            raise InvalidRequestError(name, token_ids.tolist(), "has an id twice")
        supports.append(token_ids)
    return supports
