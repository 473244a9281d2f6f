"""One coordinator's stream of the verify service: from requests to verdicts, and to rounds begun by itself.

    request ─▶ job ─▶ verdict ─┬─▶ answer
                               └─▶ rule ─▶ a proposal ahead that follows the outcome ─▶ job ─▶ verdict ─▶ ...

Knows no grpc.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from specwire import clock
from specwire.config.security.bearer import Principal
from specwire.core import (
    MAX_NUM_DRAFT_TOKENS,
    Continuation,
    Load,
    Proposal,
    Rule,
    SamplingParams,
    Timings,
    Verdict,
    Wanted,
)
from specwire.engine import serving
from specwire.engine.boot import ModelService
from specwire.engine.jobs import TokenSequence
from specwire.engine.replies import Result
from specwire.engine.serving import SequenceSpans
from specwire.engine.streams import Limits, ModelStream, OpenSequence
from specwire.errors import InvalidRequestError, SpecwireError, UnsupportedError
from specwire.proposals.pushes import Arrived
from specwire.rpc.wire import verify as verify_wire
from specwire.rpc.wire.verify import AheadOrder, VerifyAnswer, VerifyOrder
from specwire.telemetry import tracing
from specwire.telemetry.tracing import Span
from specwire.v1 import common_pb2, verify_pb2
from verify_service.ahead import MAX_AHEAD, Ahead, Next
from verify_service.own import Drafting, Going
from verify_service.verifier import VerifyJob

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _State:
    """What is kept for a sequence.

    Attributes:
        ahead: None if it may not go on by itself.
        begun: rounds that it began by itself, oldest first, and that the coordinator has not asked for yet.
        going: with what the service proposes, or without a proposal.
        is_drafted: whether the service proposes for it by itself.
    """

    spans: SequenceSpans
    going: Going
    is_drafted: bool
    ahead: Ahead | None = None
    begun: list[_Round] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Round:
    """What a job is for: a request, or a round that the sequence began by itself.

    Attributes:
        request_id: 0 without a request.
        ahead_id: of its proposal, if it was begun here; else 0.
        received_ns: when its request arrived; None before one does, for a round that was begun here.
        span: around its request.
        proposal: with what the rule needs; None if it is not applied here.
        continuation: how the sequence goes on after it, or what its own proposal follows.
        is_done: whether its verdict is on its way.
        has_failed: whether it failed before it was confirmed.
        job: of a round that was begun here, until it is done.
    """

    sequence: OpenSequence[_State]
    request_id: int
    ahead_id: int
    received_ns: int | None
    span: Span
    proposal: Proposal | None = None
    continuation: Continuation | None = None
    job: VerifyJob | None = None
    is_done: bool = False
    has_failed: bool = False


class VerifyStream(ModelStream[_State, VerifyJob]):
    def __init__(
        self,
        service: ModelService,
        write: Callable[[Any], Any],
        limits: Limits,
        caller: Principal,
        spans_of: Callable[[Iterable[tuple[str, str]]], SequenceSpans],
    ) -> None:
        """As `ModelStream`.

        Args:
            spans_of: what makes the spans of a sequence, given its trace headers.
        """
        super().__init__(service, write, limits, caller)
        self._spans_of = spans_of
        self._arrived = Arrived()

    def opened(self, message: common_pb2.OpenSequence, tokens: TokenSequence) -> _State:
        spans = self._spans_of(message.trace_headers.items())
        longest_len = self.service.info.longest_len
        if not 0 <= message.end_len <= longest_len:
            raise InvalidRequestError("end_len", message.end_len, f"must lie in [0, {longest_len}]")
        grammar = tokens.params.grammar
        if grammar is not None and tokens.grammar is None:
            raise UnsupportedError("grammar", grammar.kind, "this service does not constrain outputs")
        ahead = Ahead(tokens.params) if message.may_go_on else None
        going = Going(message.end_len, longest_len, message.may_go_on)
        return _State(spans, going, self.service.info.drafts or grammar is not None, ahead)

    def received(self, message: verify_pb2.VerifyRequest) -> None:
        received_ns = clock.stopwatch_ns()
        if message.HasField("ahead"):
            for ahead in verify_wire.ahead_from_proto(message.ahead, self.service.info.vocab_size):
                with self.failing(ahead.sequence_id):
                    if (sequence := self.of(ahead.sequence_id)) is not None:
                        self.when_ready(sequence, partial(self._keep, sequence, ahead))
            self._arrived.add(message.ByteSize())
            self.changed()
        for order in verify_wire.orders_from_proto(message, self.service.info.vocab_size):
            with self.failing(order.sequence_id):
                if (sequence := self.of(order.sequence_id)) is not None:
                    self.when_ready(sequence, partial(self._requested, sequence, order, received_ns))

    def _requested(self, sequence: OpenSequence[_State], order: VerifyOrder, received_ns: int) -> None:
        if sequence.num_unanswered:
            raise InvalidRequestError("sequence_ids", order.sequence_id, "has a request without an answer")
        if order.problem is not None:
            raise order.problem
        sequence.state.going.wanted = _wanted(order.wanted, is_drafted=sequence.state.is_drafted)
        if order.ahead_id:
            self._confirm(sequence, order, received_ns)
        else:
            self._submit(sequence, order, received_ns)

    def _keep(self, sequence: OpenSequence[_State], order: AheadOrder) -> None:
        ahead = sequence.state.ahead
        if ahead is None:
            raise InvalidRequestError("ahead", order.ahead_id, "the sequence was opened without may_go_on")
        verify_wire.check_ahead(order, ahead.last_id, self.service.info.longest_len)
        self._check_kind(order.proposal, sequence.tokens.params)
        ahead.add(order)

    def _submit(self, sequence: OpenSequence[_State], order: VerifyOrder, received_ns: int) -> None:
        """Judge the proposal of a request; rounds that were begun for other ones are dropped."""
        self._check_kind(order.proposal, sequence.tokens.params)
        state = sequence.state
        job = VerifyJob(sequence.tokens, order.base_len, order.token_ids, proposal=order.proposal)
        if state.begun:
            state.begun.clear()
            state.going = state.going.again()
        span = state.spans.serving(order.traceparent)
        asked = job.tag = _Round(sequence, order.request_id, 0, received_ns, span)
        if all(len(support.probs) for support in order.proposal.supports):
            asked.proposal = order.proposal
        if state.ahead is not None:
            state.ahead.commit(order.base_len, order.token_ids)
        job.drafting = _drafting(asked)
        self.service.engine.submit(job, self._judged, extra_len=len(order.proposal.token_ids))
        sequence.num_unanswered += 1

    def _confirm(self, sequence: OpenSequence[_State], order: VerifyOrder, received_ns: int) -> None:
        """A request for a round that was begun here; its verdict may be on its way already."""
        rounds = sequence.state.begun
        if not rounds or rounds[0].ahead_id != order.ahead_id:
            raise InvalidRequestError("ahead_ids", order.ahead_id, "is not what the sequence goes on with")
        begun = rounds[0]
        sequence.state.going.num_asked += begun.ahead_id < 0
        if num_tokens := len(order.token_ids) + len(order.proposal.token_ids):
            raise InvalidRequestError("num_tokens", num_tokens, "must be 0 with an ahead_id")
        assert begun.proposal is not None
        if order.base_len != begun.proposal.base_len:
            raise InvalidRequestError("base_lens", order.base_len, f"must be {begun.proposal.base_len}")
        span = sequence.state.spans.serving(order.traceparent)
        if begun.is_done:
            del rounds[0]
            sequence.state.spans.finish_at_once(span, order.base_len)
            return
        begun.received_ns, begun.span = received_ns, span
        sequence.num_unanswered += 1
        if begun.has_failed:
            self._begin_again(begun)
        else:
            assert begun.job is not None
            self.service.engine.promote(begun.job)

    def _begin(self, sequence: OpenSequence[_State], following: Next, base_len: int) -> None:
        """Go on: in the background, since requests of other sequences come first."""
        begun = _Round(sequence, 0, following.continuation.ahead_id, None, Span(), following.proposal)
        job = VerifyJob(sequence.tokens, base_len, following.token_ids, worth=1.0, goes_on=True, tag=begun)
        job.proposal, job.drafting, begun.job = following.proposal, _drafting(begun), job
        num_drafted = len(following.proposal.token_ids)
        self.service.engine.submit(job, self._judged, extra_len=num_drafted, background=True)
        sequence.state.begun.append(begun)

    def _begin_again(self, begun: _Round) -> None:
        """In the foreground now, as there was no memory to work ahead in."""
        assert begun.job is not None
        before, begun.has_failed = begun.job, False
        job = VerifyJob(before.sequence, before.base_len, before.token_ids, tag=begun)
        job.proposal, job.drafting, begun.job = before.proposal, before.drafting, job
        self.service.engine.submit(job, self._judged, extra_len=len(job.proposal.token_ids))

    def _check_kind(self, proposal: Proposal, params: SamplingParams) -> None:
        """Refuse a proposal that the rule of its sequence does not judge, or this service.

        Raises:
            InvalidRequestError, UnsupportedError: naming the column.
        """
        num_tokens, num_supports = len(proposal.token_ids), len(proposal.supports)
        if num_tokens > MAX_NUM_DRAFT_TOKENS:
            raise InvalidRequestError("num_tokens", num_tokens, f"must lie in [0, {MAX_NUM_DRAFT_TOKENS}]")
        if proposal.parents and not self.service.info.trees:
            raise UnsupportedError("parent_indices", proposal.parents, "this service verifies chains only")
        if proposal.leaves and params.rule is not Rule.KSEQ:
            raise UnsupportedError("num_chains", len(proposal.leaves), f"not under rule {params.rule}")
        if proposal.parents and not (params.matches_tokens or proposal.leaves):
            raise UnsupportedError("parent_indices", proposal.parents, f"not under rule {params.rule}")
        num_wanted = 0 if params.matches_tokens else num_tokens
        if num_supports != num_wanted:
            raise InvalidRequestError("support_lens", num_supports, f"must be {num_wanted}")

    # --- verdicts -------------------------------------------------------------------------------------

    def _judged(self, results: Sequence[Result]) -> None:
        """Results of a pass: go on where something is there for it, then answer."""
        answered: list[VerifyJob] = []
        with self.service.engine.together():
            for job, result in results:
                assert isinstance(job, VerifyJob)
                judged: _Round = job.tag
                sequence = judged.sequence
                is_open = self.sequences.get(sequence.sequence_id) is sequence
                if not is_open or (judged.ahead_id and judged not in sequence.state.begun):
                    # Its sequence is closed, or another round took its place.
                    judged.span.fail(tracing.CANCELLED)
                    judged.span.end()
                    continue
                if isinstance(result, SpecwireError):
                    self._fail(job, judged, result)
                    continue
                judged.is_done, judged.job = True, None
                if judged.received_ns is not None:
                    sequence.num_unanswered -= 1
                    if judged.ahead_id:
                        sequence.state.begun.remove(judged)
                if job.drafting is not None:
                    judged.continuation = self._gone_on(sequence, job.drafting, job.following)
                elif judged.proposal is not None and sequence.state.ahead is not None:
                    judged.continuation = self._go_on(sequence, judged.proposal, result)
                answered.append(job)
        self.answer(answered)

    def _go_on(
        self, sequence: OpenSequence[_State], proposal: Proposal, verdict: Verdict
    ) -> Continuation | None:
        """Begin what follows this verdict, if anything is there for it; the verdict stands if that fails."""
        ahead = sequence.state.ahead
        assert ahead is not None
        if len(sequence.state.begun) >= MAX_AHEAD:  # the coordinator asks for none of them
            return None
        try:
            following = ahead.after(proposal, verdict)
            if following is None:
                return None
            self._begin(sequence, following, verdict.base_len)
        except SpecwireError as error:  # such as the end of the context; the coordinator comes to it too
            log.debug("sequence %d does not go on: %s", sequence.sequence_id, error)
            return None
        except Exception:
            log.exception("going on failed")
            return None
        return following.continuation

    def _gone_on(
        self, sequence: OpenSequence[_State], drafting: Drafting, following: VerifyJob | None
    ) -> Continuation | None:
        """Note the round that the engine has begun after this one, if it has; None if nothing is proposed."""
        outcome, state = drafting.outcome, sequence.state
        if outcome is None or not (following or drafting.proposal):
            return None
        if following is None:
            return Continuation(0, outcome)
        assert following.drafting is not None
        proposal, ahead_id = following.drafting.judged, following.drafting.ahead_id
        begun = _Round(sequence, 0, ahead_id, None, Span(), proposal, job=following)
        following.tag = begun
        self.service.engine.expect(following, self._judged)
        state.begun.append(begun)
        if state.ahead is not None:
            state.ahead.commit(following.base_len, following.token_ids)
        return Continuation(ahead_id, outcome)

    def _fail(self, job: VerifyJob, judged: _Round, error: SpecwireError) -> None:
        if judged.ahead_id and judged.received_ns is None:
            judged.has_failed = True
        elif job.worth:  # a background job, just before the engine promoted it
            with self.failing(judged.sequence.sequence_id):
                self._begin_again(judged)
        else:
            judged.span.fail(error.status, str(error))
            judged.span.end()
            self.fail(judged.sequence.sequence_id, error)

    def next_message(self) -> verify_pb2.VerifyResponse | None:
        """With what has arrived, be it without answers."""
        message: verify_pb2.VerifyResponse | None = super().next_message()
        if message is None and self._arrived.is_due:
            message = self.encoded((), ())
        if message is not None:
            message.num_arrived_bytes = self._arrived.report()
        return message

    def encoded(
        self, answers: Sequence[VerifyJob], errors: Sequence[common_pb2.SequenceError]
    ) -> verify_pb2.VerifyResponse:
        load = self.service.engine.load(answers[-1]) if answers else Load()
        found = [self._answer(job) for job in answers]
        return verify_wire.response_to_proto(found, errors, load, self.service.info.incarnation)

    def _answer(self, job: VerifyJob) -> VerifyAnswer:
        judged: _Round = job.tag
        if judged.received_ns is not None:
            spent = serving.timings(job, judged.received_ns)
        else:  # since its pass the rounds after it ran
            now_ns = clock.stopwatch_ns()
            spent = Timings(ahead_ns=job.forward_ns + now_ns - job.finished_ns)
        judged.sequence.state.spans.finish(judged.span, job, spent)
        return VerifyAnswer(
            judged.sequence.sequence_id,
            judged.request_id,
            job.result,
            spent,
            job.num_cached_tokens,
            judged.ahead_id,
            judged.continuation,
            proposal=job.drafting.proposal if job.drafting else None,
        )


def _wanted(wanted: Wanted, *, is_drafted: bool) -> Wanted:
    """What is to follow the verdict; no proposal where the service does not draft."""
    for name, attribute in verify_wire.WANTED_COLUMNS.items():
        value = getattr(wanted, attribute)
        most = MAX_AHEAD if attribute == "num_plain" else MAX_NUM_DRAFT_TOKENS
        if not 0 <= value <= most:
            raise InvalidRequestError(name, value, f"must lie in [0, {most}]")
    return wanted if is_drafted else replace(wanted, num_draft_tokens=0)


def _drafting(judged: _Round) -> Drafting | None:
    """What follows a round that the service proposes after, or goes on from by itself; else None."""
    going = judged.sequence.state.going
    wants = going.wanted.num_draft_tokens or (going.wanted.num_plain and going.goes_on)
    if judged.proposal is None or not going.end_len or not wants:
        return None
    return Drafting(judged.proposal, going.wanted, going)
