"""`specwire.v1.DraftService`: messages in, messages out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from draft_service.lookahead import DraftAnswer, Lookahead, PreparedBranch
from specwire.core import Preparation, Proposal, SamplingParams
from specwire.engine import serving
from specwire.engine.boot import ModelService
from specwire.engine.serving import StreamSpans
from specwire.errors import InvalidRequestError, UnsupportedError
from specwire.estimate import clock
from specwire.estimate.forecast import Forecast, SharedForecast
from specwire.rpc import listening
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from specwire.wire import model as wire

_METHOD = "specwire.v1.DraftService/Draft"


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One stream is one sequence; its KV cache is freed when the stream ends, for whatever reason."""

    def __init__(
        self,
        service: ModelService,
        tracer: tracing.Tracing,
        *,
        max_outcomes: int,
        max_support: int,
        trace_detail: bool = False,
    ) -> None:
        self._service = service
        self._tracer = tracer
        self._trace_detail = trace_detail
        self._max_outcomes = max_outcomes
        self._support_len = min(max_support, service.info.vocab_size)
        self._forecasts: defaultdict[str, SharedForecast] = defaultdict(SharedForecast)

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # noqa: N802
        spans = StreamSpans.of(
            self._tracer, "draft", _METHOD, listening.metadata(context), is_detailed=self._trace_detail
        )
        with contextlib.ExitStack() as stack:
            answers = _Answers(context, self._service.info.incarnation, spans, support_len=self._support_len)
            lookahead: Lookahead | None = None
            async for request in requests:
                answers.received(request)
                if lookahead is None:
                    lookahead = self._open(request.open, answers, stack)
                elif request.HasField("open"):
                    raise InvalidRequestError("open", "set", "only the first request of a stream may open it")
                preparation = self._preparation(request)
                with spans.serving(request.traceparent) as span:
                    answer = await lookahead.draft(
                        request.base_len,
                        request.token_ids,
                        wire.check_num_draft_tokens("num_draft_tokens", request.num_draft_tokens),
                        preparation,
                        self._max_depth(request, lookahead.params),
                    )
                    if request.num_draft_tokens or preparation is None:
                        await answers.answer(request, answer, span)

    def _open(
        self, message: common_pb2.OpenSequence, answers: _Answers, stack: contextlib.ExitStack
    ) -> Lookahead:
        sequence = stack.enter_context(self._service.opened(message))
        lookahead = Lookahead(
            self._service.engine,
            sequence,
            vocab_limit=message.vocab_limit,
            forecast=Forecast(self._forecasts[_kind(sequence.params)]),
            push=answers.push,
        )
        stack.callback(lookahead.close)
        return lookahead

    def _preparation(self, request: draft_pb2.DraftRequest) -> Preparation | None:
        """What the request asks to prepare, limited to what this service allows."""
        if not request.HasField("prepare"):
            return None
        if not self._max_outcomes:
            raise UnsupportedError("prepare", "set", "this service prepares no outcomes")
        asked = wire.preparation_from_proto(request.prepare)
        return dataclasses.replace(asked, num_outcomes=min(asked.num_outcomes, self._max_outcomes))

    def _max_depth(self, request: draft_pb2.DraftRequest, params: SamplingParams) -> int:
        """Raises:
        UnsupportedError: a tree for a stream, or from a service, that cannot have one.
        """
        for name, depth in (
            ("max_depth", request.max_depth),
            ("prepare.max_depth", request.prepare.max_depth),
        ):
            wire.check_num_draft_tokens(name, depth)
            if depth and not self._service.info.trees:
                raise UnsupportedError(name, depth, "this service drafts chains only")
            if depth and not params.matches_tokens:
                raise UnsupportedError(name, depth, f"not under rule {params.rule}")
        return request.max_depth

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Any
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(
            model=wire.model_info_to_proto(
                dataclasses.replace(self._service.info, prepares_outcomes=self._max_outcomes > 0)
            ),
            status=self._service.status(),
        )


class _Answers:
    """Writes the stream's responses, one at a time: answers, and prepared proposals between them.

    Args:
        support_len: length that all supports are padded to.

    Attributes:
        received_ns: when the last request arrived, by the stopwatch.
    """

    def __init__(self, context: Any, incarnation: str, spans: StreamSpans, *, support_len: int) -> None:
        self._context = context
        self._incarnation = incarnation
        self._spans = spans
        self._support_len = support_len
        self._write_lock = asyncio.Lock()
        self._last = draft_pb2.DraftRequest()
        self.received_ns = 0

    def received(self, request: draft_pb2.DraftRequest) -> None:
        """A request has arrived."""
        self._last, self.received_ns = request, clock.stopwatch_ns()

    async def answer(self, request: draft_pb2.DraftRequest, answer: DraftAnswer, span: tracing.Span) -> None:
        """Answer the last request, which `span` is around."""
        job, proposal, was_prepared, ahead_ns = answer
        message = draft_pb2.DraftResponse(
            request_id=request.request_id,
            base_len=job.committed_len,
            incarnation=self._incarnation,
            num_cached_tokens=0 if was_prepared else job.num_cached_tokens,
            proposals=[self._message(proposal, (), request.num_draft_tokens)] if proposal else [],
            begun_ahead=was_prepared,
        )
        async with self._write_lock:
            message.timings.CopyFrom(serving.timings(job, self.received_ns, ahead_ns))
            self._spans.finish(span, job, message.timings)
            await self._context.write(message)

    async def push(self, base_len: int, prepared: Sequence[PreparedBranch]) -> None:
        """Send proposals ahead of a request."""
        message = draft_pb2.DraftResponse(
            base_len=base_len, incarnation=self._incarnation, traceparent=self._trace(base_len, prepared)
        )
        for each in prepared:
            proposal = self._message(each.proposal, each.path, each.num_wanted)
            proposal.forward_ns = each.forward_ns
            message.proposals.append(proposal)
        async with self._write_lock:
            message.last_request_id = self._last.request_id
            message.last_request_age_ns = clock.stopwatch_ns() - self.received_ns
            await self._context.write(message)

    def _trace(self, base_len: int, prepared: Sequence[PreparedBranch]) -> str:
        """Record a span of the preparation, a child of the generation; returns its traceparent.

        Not of a round: it may have begun in one, and is used in another, which links to it.
        """
        if not self._spans.context.traceparent:
            return ""
        span = self._spans.tracer.span(
            "draft.prepare",
            parent=self._spans.context,
            start_ns=clock.epoch_ns(min(each.started_ns for each in prepared)),
            attributes={names.BASE_LEN: base_len, names.NUM_OUTCOMES: len(prepared)},
        )
        span.end(clock.epoch_ns(max(each.finished_ns for each in prepared)))
        return span.traceparent

    def _message(self, proposal: Proposal, path: Sequence[int], num_tokens: int) -> draft_pb2.Proposal:
        return wire.proposal_to_proto(proposal, path, num_tokens=num_tokens, support_len=self._support_len)


def _kind(params: SamplingParams) -> str:
    """Key of the forecast shared by streams that sample in the same way."""
    return "greedy" if params.greedy else str(params.rule)
