"""`specwire.v1.DraftService`: messages in, messages out."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draft_service.forecast import Forecast, SharedForecast
from draft_service.inner.hierarchy import Hierarchy
from draft_service.learner import Learner
from draft_service.lookahead import Branch, Lookahead, Request
from draft_service.translation import Transcript
from draft_service.vocabulary import SharedVocabulary
from specwire import clock
from specwire.config.security.bearer import Principal
from specwire.core import Rule, SamplingParams
from specwire.engine import serving
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.engine.replies import Result
from specwire.engine.serving import SequenceSpans
from specwire.engine.streams import Limits, ModelStream, OpenSequence
from specwire.errors import SpecwireError, UnsupportedError
from specwire.proposals.pushes import PushWindow
from specwire.rpc import listening
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import model as wire
from specwire.rpc.wire.draft import DraftAnswer, DraftOrder, PreparedAnswer
from specwire.rpc.wire.proposals import num_bytes
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

_METHOD = "specwire.v1.DraftService/Draft"


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """One stream carries all sequences of a coordinator, whose KV caches are freed when it ends.

    Args:
        limits: of all streams together.

    Attributes: what all streams share.
        max_outcomes: most that may be prepared at a time; 0 for none.
        support_len: length that all supports are padded to.
        forecasts: learnt from sequences that sample in the same way.
    """

    def __init__(
        self,
        service: ModelService,
        tracer: tracing.Tracing,
        *,
        max_outcomes: int,
        max_support: int,
        trace_detail: bool = False,
        limits: Limits | None = None,
        shared: SharedVocabulary | None = None,
        hierarchy: Hierarchy | None = None,
        learner: Learner | None = None,
    ) -> None:
        self.max_outcomes = max_outcomes
        self.support_len = min(max_support, service.info.vocab_size)
        self.forecasts: defaultdict[str, SharedForecast] = defaultdict(SharedForecast)
        self.shared, self.hierarchy, self.learner = shared, hierarchy, learner
        self._service, self._limits = service, limits or Limits()
        self._tracer, self._trace_detail = tracer, trace_detail

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:  # noqa: N802
        await self.stream(context).serve(requests)

    def stream(self, context: Any) -> DraftStream:
        caller = listening.caller(context)
        return DraftStream(self._service, context.write, self._limits, caller, self)

    def spans_of(self, message: common_pb2.OpenSequence) -> SequenceSpans:
        context = self._tracer.propagators.read(message.trace_headers.items())
        return SequenceSpans(self._tracer, "draft", _METHOD, context, self._trace_detail)

    async def GetModelInfo(  # noqa: N802
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Any
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(
            model=wire.model_info_to_proto(
                dataclasses.replace(
                    self._service.info,
                    prepares_outcomes=self.max_outcomes > 0,
                    learning=self.learner.learning if self.learner else None,
                )
            ),
            status=self._service.status(),
        )


@dataclass(eq=False, slots=True)
class _State:
    lookahead: Lookahead
    spans: SequenceSpans
    last: Request | None = None  # the last one that arrived

    def fail(self, kind: str, description: str = "") -> None:
        """Requests without an answer end like this."""
        for request in self.lookahead.requests:
            request.span.fail(kind, description)
            request.span.end()

    def close(self) -> None:
        """Free what was prepared."""
        self.fail(tracing.CANCELLED)
        self.lookahead.close()


class DraftStream(ModelStream[_State, "tuple[_State, Request]"]):
    """One coordinator's stream: answers, and prepared proposals between them.

    Prepared proposals are collected when the stream has room for them, so those that a request made useless
    meanwhile are never sent.
    """

    def __init__(
        self,
        service: ModelService,
        write: Callable[[Any], Any],
        limits: Limits,
        caller: Principal,
        servicer: DraftServicer,
    ) -> None:
        super().__init__(service, write, limits, caller)
        self._servicer = servicer
        self._window = PushWindow()
        self._to_advance: dict[int, None] = {}  # sequences with results that they are to work ahead from
        self._to_push: dict[int, None] = {}  # sequences that may have prepared proposals; longest first

    # --- requests -------------------------------------------------------------------------------------

    def opened(self, message: common_pb2.OpenSequence, tokens: TokenSequence) -> _State:
        learner, shared, hierarchy = self._servicer.learner, self._servicer.shared, self._servicer.hierarchy
        params = tokens.params
        kind = "greedy" if params.greedy else str(params.rule)
        lookahead = Lookahead(
            self.service.engine,
            tokens,
            sequence_id=message.sequence_id,
            vocab_limit=message.vocab_limit,
            forecast=Forecast(self._servicer.forecasts[kind]),
            sink=self._settle,
            answer=self._answered,
            transcript=Transcript(shared, self.service.info.context_len) if shared else None,
            inner=hierarchy.open(params) if hierarchy else None,
            lesson=learner.lesson(tokens) if learner and message.may_learn else None,
        )
        return _State(lookahead, self._servicer.spans_of(message))

    def received(self, message: draft_pb2.DraftRequest) -> None:
        received_ns = clock.stopwatch_ns()
        if message.num_arrived_bytes:
            self._window.arrived(message.num_arrived_bytes, received_ns)
            self.changed()
        for order in draft_wire.orders_from_proto(message):
            sequence = self.of(order.sequence_id)
            if sequence is not None:
                with self.failing(order.sequence_id):
                    self.when_ready(sequence, partial(self._requested, sequence, order, received_ns))

    def _requested(self, sequence: OpenSequence[_State], order: DraftOrder, received_ns: int) -> None:
        state = sequence.state
        order = self._checked(order, sequence.tokens.params)
        state.last = Request(order, received_ns, state.spans.serving(order.traceparent))
        sequence.num_unanswered += 1
        state.lookahead.request(state.last)

    def _checked(self, order: DraftOrder, params: SamplingParams) -> DraftOrder:
        """The order, limited to what this service prepares.

        Raises:
            InvalidRequestError: a count is out of range.
            UnsupportedError: this service prepares nothing, or cannot draft a tree here.
        """
        draft_wire.check_order(order)
        self._check_depth("max_depth", order.max_depth, params)
        self._check_chains(order.num_chains, params)
        if order.prepare is None:
            return order
        if order.num_chains > 1:
            return order._replace(prepare=None)
        if (self._servicer.shared or params.grammar) and not params.matches_tokens:
            # How long a branch takes would depend on tokens that are not judged yet: how many of the draft's
            # own tokens they are, or what the grammar does with them: "Time and tokens" in docs/exactness.md.
            return order._replace(prepare=None)
        most = self._servicer.max_outcomes
        if not most:
            raise UnsupportedError("prepare", "set", "this service prepares no outcomes")
        self._check_depth("prepare.max_depth", order.prepare.max_depth, params)
        num_outcomes = min(order.prepare.num_outcomes, most)
        return order._replace(prepare=dataclasses.replace(order.prepare, num_outcomes=num_outcomes))

    def _check_depth(self, name: str, depth: int, params: SamplingParams) -> None:
        if depth and not self.service.info.trees:
            raise UnsupportedError(name, depth, "this service drafts chains only")
        if depth and not params.matches_tokens:
            raise UnsupportedError(name, depth, f"not under rule {params.rule}")

    def _check_chains(self, num_chains: int, params: SamplingParams) -> None:
        if num_chains == 1:
            return
        if params.greedy or params.rule is not Rule.KSEQ:
            raise UnsupportedError("num_chains", num_chains, f"not under rule {params.rule}")
        if not self.service.info.trees:
            raise UnsupportedError("num_chains", num_chains, "this service drafts one chain only")
        if self._servicer.shared:
            raise UnsupportedError("num_chains", num_chains, "not with another vocabulary than the target's")

    def fail(self, sequence_id: int, error: SpecwireError) -> None:
        if sequence := self.sequences.get(sequence_id):
            sequence.state.fail(error.status, tracing.described(error))
        super().fail(sequence_id, error)

    # --- results --------------------------------------------------------------------------------------

    def _settle(self, results: Sequence[Result]) -> None:
        """Results of a step. Answers leave before the draft works ahead."""
        with self.service.engine.together():
            for job, result in results:
                sequence_id, branch = job.tag
                job.tag = None  # a branch refers to its job: no cycle is left to collect
                sequence = self.sequences.get(sequence_id)
                if sequence is None:
                    continue
                with self.failing(sequence_id):
                    sequence.state.lookahead.settle(branch, job, result)
                    self._advance_soon(sequence_id, sequence.state.lookahead)

    def _answered(self, request: Request) -> None:
        order = request.order
        sequence = self.sequences[order.sequence_id]
        sequence.num_unanswered -= 1
        self._advance_soon(order.sequence_id, sequence.state.lookahead)
        if order.num_draft_tokens or order.prepare is None:
            self.answer([(sequence.state, request)])
        else:
            request.span.end()
            self.changed()

    def _advance_soon(self, sequence_id: int, lookahead: Lookahead) -> None:
        if not lookahead.works_ahead:
            return
        if not self._to_advance:
            asyncio.get_running_loop().call_soon(self._advance)
        self._to_advance[sequence_id] = None

    def _advance(self) -> None:
        """Let sequences work ahead, those with something new."""
        sequence_ids, self._to_advance = self._to_advance, {}
        with self.service.engine.together():
            for sequence_id in sequence_ids:
                if sequence := self.sequences.get(sequence_id):
                    with self.failing(sequence_id):
                        sequence.state.lookahead.work_ahead()
        self._to_push |= sequence_ids
        self.changed()

    # --- messages -------------------------------------------------------------------------------------

    def encoded(
        self,
        answers: Sequence[tuple[_State, Request]],
        errors: Sequence[common_pb2.SequenceError],
        prepared: Sequence[PreparedAnswer] = (),
    ) -> draft_pb2.DraftResponse:
        found = [_answer(state, request) for state, request in answers]
        incarnation, support_len = self.service.info.incarnation, self._servicer.support_len
        return draft_wire.response_to_proto(found, prepared, errors, incarnation, support_len)

    def next_message(self) -> draft_pb2.DraftResponse | None:
        """Answers before prepared proposals, which end with the requests."""
        message: draft_pb2.DraftResponse | None = super().next_message()
        if message is not None or self.is_half_closed:
            return message
        prepared = self._take_prepared()
        return self.encoded((), (), prepared) if prepared else None

    def _take_prepared(self) -> list[PreparedAnswer]:
        """As many as may be under way; sequences take turns."""
        found: list[PreparedAnswer] = []
        room = self._window.room
        while self._to_push and room > 0:
            sequence_id = next(iter(self._to_push))
            del self._to_push[sequence_id]
            if sequence := self.sequences.get(sequence_id):
                state, branches = sequence.state, list[Branch]()
                for branch in state.lookahead.take_ready():
                    branches.append(branch)
                    assert branch.proposal is not None
                    room -= num_bytes(branch.path, branch.proposal, self._servicer.support_len)
                    if room <= 0:
                        self._to_push[sequence_id] = None
                        break
                found += _prepared(sequence_id, state, branches)
        return found

    async def write(self, message: draft_pb2.DraftResponse) -> None:
        if message.HasField("prepared"):
            self._window.sent(message.ByteSize(), clock.stopwatch_ns())
        await super().write(message)


def _answer(state: _State, request: Request) -> DraftAnswer:
    order, job = request.order, request.job
    spent = serving.timings(job, request.received_ns, request.ahead_ns)
    state.spans.finish(request.span, job, spent)
    return DraftAnswer(
        order.sequence_id,
        order.request_id,
        request.proposal,
        spent,
        0 if request.was_prepared else job.num_cached_tokens,
        request.was_prepared,
    )


def _prepared(sequence_id: int, state: _State, branches: Sequence[Branch]) -> list[PreparedAnswer]:
    if not branches:
        return []
    assert state.last is not None
    age_ns, request_id = clock.stopwatch_ns() - state.last.received_ns, state.last.order.request_id
    traceparent = _trace(state.spans, branches)
    found: list[PreparedAnswer] = []
    for branch in branches:
        assert branch.proposal is not None
        start = branch.proposal.base_len - len(branch.path)  # the length that its path begins at
        proposal, forward_ns = dataclasses.replace(branch.proposal, base_len=start), branch.job.forward_ns
        found.append(
            PreparedAnswer(sequence_id, branch.path, proposal, request_id, age_ns, forward_ns, traceparent)
        )
    return found


def _trace(spans: SequenceSpans, branches: Sequence[Branch]) -> str:
    """Record a span of the preparation, a child of the generation; returns its traceparent.

    Not of a round: it may have begun in one, and is used in another, which links to it.
    """
    if not spans.context.traceparent:
        return ""
    first = branches[0]
    span = spans.tracer.span(
        "draft.prepare",
        parent=spans.context,
        start_ns=clock.epoch_ns(min(branch.job.started_ns for branch in branches)),
        attributes={
            names.BASE_LEN: first.job.committed_len - len(first.path),
            names.NUM_OUTCOMES: len(branches),
        },
    )
    span.end(clock.epoch_ns(max(branch.job.finished_ns for branch in branches)))
    return span.traceparent
