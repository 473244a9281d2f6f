"""`specwire.v1.DraftService`: messages in, messages out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from draft_service.drafter import DraftJob
from specwire import rpc, tracing, wire
from specwire.core import Proposal
from specwire.engine import boot
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.errors import InvalidRequestError
from specwire.v1 import draft_pb2, draft_pb2_grpc


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One stream is one sequence; its KV cache goes when the stream goes, however it ends."""

    def __init__(self, service: ModelService, tracer: tracing.Tracing) -> None:
        self._service = service
        self._tracer = tracer

    @rpc.translate_errors
    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # noqa: N802
        with contextlib.ExitStack() as stack:
            sequence: TokenSequence | None = None
            vocab_limit = 0
            async for request in requests:
                if sequence is None:
                    sequence = stack.enter_context(self._service.opened(request.open))
                    vocab_limit = request.open.vocab_limit
                elif request.HasField("open"):
                    raise InvalidRequestError("open", "set", "only the first request of a stream may open it")
                job = _job(sequence, request, vocab_limit)
                proposal: Proposal | None = await self._service.engine.run(
                    job, extra_len=request.num_draft_tokens
                )
                self._trace(job, request.traceparent)
                await context.write(self._response(request, job, proposal))

    @rpc.translate_errors
    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Any
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(
            model=wire.model_info_to_proto(self._service.info), status=self._service.status()
        )

    def _response(
        self, request: draft_pb2.DraftRequest, job: DraftJob, proposal: Proposal | None
    ) -> draft_pb2.DraftResponse:
        return draft_pb2.DraftResponse(
            request_id=request.request_id,
            base_len=job.committed_len,
            incarnation=self._service.info.incarnation,
            timings=boot.timings(job),
            num_cached_tokens=job.num_cached_tokens,
            proposals=[wire.proposal_to_proto(proposal)] if proposal else [],
        )

    def _trace(self, job: DraftJob, parent: str) -> None:
        if parent:
            boot.record_spans(self._tracer, "draft", job, parent)


def _job(sequence: TokenSequence, request: draft_pb2.DraftRequest, vocab_limit: int) -> DraftJob:
    return DraftJob(
        sequence,
        request.base_len,
        list(request.token_ids),
        num_draft_tokens=wire.check_num_draft_tokens("num_draft_tokens", request.num_draft_tokens),
        vocab_limit=vocab_limit,
    )
