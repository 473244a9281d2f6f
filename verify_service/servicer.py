"""`specwire.v1.VerifyService`: messages in, messages out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specwire import tree
from specwire.core import MAX_NUM_DRAFT_TOKENS, IntArray, Load, SamplingParams
from specwire.engine import serving
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.engine.replies import Result
from specwire.engine.serving import SequenceSpans
from specwire.engine.streams import Limits, ModelStream, OpenSequence
from specwire.errors import InvalidRequestError, SpecwireError, UnsupportedError
from specwire.estimate import clock
from specwire.rpc import listening
from specwire.telemetry import tracing
from specwire.telemetry.tracing import Span
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from specwire.wire import model as wire
from specwire.wire import verify as verify_wire
from specwire.wire.verify import VerifyAnswer, VerifyOrder
from verify_service.verifier import VerifyJob

_METHOD = "specwire.v1.VerifyService/Verify"


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    """One stream carries all sequences of a coordinator, whose KV caches are freed when it ends."""

    def __init__(
        self,
        service: ModelService,
        tracer: tracing.Tracing,
        *,
        trace_detail: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self._service = service
        self._tracer = tracer
        self._trace_detail = trace_detail
        self._limits = limits or Limits()

    async def Verify(self, requests: AsyncIterator[verify_pb2.VerifyRequest], context: Any) -> None:  # noqa: N802
        stream = _VerifyStream(self._service, context.write, self._limits, listening.caller(context))
        stream.spans_of = self._spans
        await stream.serve(requests)

    def _spans(self, message: common_pb2.OpenSequence) -> SequenceSpans:
        headers = message.trace_headers.items()
        return SequenceSpans.of(self._tracer, "verify", _METHOD, headers, is_detailed=self._trace_detail)

    async def GetModelInfo(  # noqa: N802
        self, request: verify_pb2.VerifyServiceGetModelInfoRequest, context: Any
    ) -> verify_pb2.VerifyServiceGetModelInfoResponse:
        return verify_pb2.VerifyServiceGetModelInfoResponse(
            model=wire.model_info_to_proto(self._service.info), status=self._service.status()
        )


class _Asked(NamedTuple):
    """The request that a job is for."""

    sequence: OpenSequence[SequenceSpans]
    request_id: int
    received_ns: int
    span: Span


class _VerifyStream(ModelStream[SequenceSpans, VerifyJob]):
    """One coordinator's stream; the state of a sequence is what makes its spans."""

    spans_of: Callable[[common_pb2.OpenSequence], SequenceSpans]

    def opened(self, message: common_pb2.OpenSequence, tokens: TokenSequence) -> SequenceSpans:
        return self.spans_of(message)

    def received(self, message: verify_pb2.VerifyRequest) -> None:
        received_ns = clock.stopwatch_ns()
        orders = verify_wire.orders_from_proto(message)
        for order in orders:
            with self.failing(order.sequence_id):
                sequence = self.of(order.sequence_id)
                if sequence is not None:
                    self._submit(sequence, order, received_ns)

    def _submit(self, sequence: OpenSequence[SequenceSpans], order: VerifyOrder, received_ns: int) -> None:
        if sequence.num_unanswered:
            raise InvalidRequestError("sequence_ids", order.sequence_id, "has a request without an answer")
        job = self._job(sequence.tokens, order)
        job.tag = _Asked(sequence, order.request_id, received_ns, sequence.state.serving(order.traceparent))
        self.service.engine.submit(job, self._judged, extra_len=len(order.draft_token_ids))
        sequence.num_unanswered += 1

    def _job(self, tokens: TokenSequence, order: VerifyOrder) -> VerifyJob:
        vocab_size, drafts = self.service.info.vocab_size, order.draft_token_ids
        if len(drafts) > MAX_NUM_DRAFT_TOKENS:
            raise InvalidRequestError(
                "num_draft_tokens", len(drafts), f"must lie in [0, {MAX_NUM_DRAFT_TOKENS}]"
            )
        if drafts and max(drafts) >= vocab_size:
            i, token_id = next((i, each) for i, each in enumerate(drafts) if each >= vocab_size)
            raise InvalidRequestError(
                f"draft_token_ids[{i}]", token_id, f"is outside the vocabulary of {vocab_size}"
            )
        return VerifyJob(
            tokens,
            order.base_len,
            order.token_ids,
            draft_token_ids=drafts,
            parents=self._parents(order, tokens.params),
            supports=_supports(order, tokens.params, vocab_size),
        )

    def _parents(self, order: VerifyOrder, params: SamplingParams) -> Sequence[int]:
        if not order.parents:
            return ()
        parents = tree.checked_parents(order.parents, len(order.draft_token_ids))
        if parents and not self.service.info.trees:
            raise UnsupportedError("parent_indices", parents, "this service verifies chains only")
        if parents and not params.matches_tokens:
            raise UnsupportedError("parent_indices", parents, f"not under rule {params.rule}")
        return parents

    def _judged(self, results: Sequence[Result]) -> None:
        """Results of a pass."""
        answered: list[Any] = []
        for job, result in results:
            asked: _Asked = job.tag
            asked.sequence.num_unanswered -= 1
            if isinstance(result, SpecwireError):
                asked.span.fail(result.status, str(result))
                asked.span.end()
                self.fail(asked.sequence.sequence_id, result)
            elif asked.sequence.sequence_id in self.sequences:
                answered.append(job)
            else:  # closed during the pass
                asked.span.fail(tracing.CANCELLED)
                asked.span.end()
        self.answer(answered)

    def encoded(
        self, answers: Sequence[VerifyJob], errors: Sequence[common_pb2.SequenceError]
    ) -> verify_pb2.VerifyResponse:
        load = self.service.engine.load(answers[-1]) if answers else Load()
        found = [self._answer(job) for job in answers]
        return verify_wire.response_to_proto(found, errors, load, self.service.info.incarnation)

    def _answer(self, job: VerifyJob) -> VerifyAnswer:
        sequence, request_id, received_ns, span = job.tag
        spent = serving.timings(job, received_ns)
        sequence.state.finish(span, job, spent)
        return VerifyAnswer(sequence.sequence_id, request_id, job.result, spent, job.num_cached_tokens)


def _supports(order: VerifyOrder, params: SamplingParams, vocab_size: int) -> Sequence[IntArray]:
    """One support per draft token, checked: unknown or repeated ids would make the residual wrong."""
    wanted = 0 if params.matches_tokens else len(order.draft_token_ids)
    if len(order.supports) != wanted:
        raise InvalidRequestError("support_lens", len(order.supports), f"must be {wanted}")
    if not wanted or are_sets(order.supports, vocab_size):
        return order.supports
    for i, token_ids in enumerate(order.supports):
        name = f"support_token_ids[{i}]"
        if len(token_ids) and token_ids.max() >= vocab_size:
            raise InvalidRequestError(
                name, int(token_ids.max()), f"is outside the vocabulary of {vocab_size}"
            )
        if len(np.unique(token_ids)) != len(token_ids):
            raise InvalidRequestError(name, token_ids.tolist(), "has an id twice")
    return order.supports


def are_sets(supports: Sequence[IntArray], vocab_size: int) -> bool:
    """Whether each is a set of token ids."""
    ids = np.concatenate(supports)
    rows = np.repeat(np.arange(len(supports)), [len(support) for support in supports])
    keys = np.sort(rows * vocab_size + ids)
    return bool((ids < vocab_size).all() and (keys[1:] != keys[:-1]).all())
