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
from verify_service.ahead import MAX_AHEAD, Ahead
from verify_service.verifier import Going, VerifyJob

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _State:
    """What is kept for a sequence.

    Attributes:
        going: with what the service proposes, or without a proposal.
        is_drafted: whether the service proposes for it by itself.
        ahead: None if it may not go on by itself.
        begun: rounds that it began by itself, oldest first, and that the coordinator has not asked for yet.
    """

    spans: SequenceSpans
    going: Going
    is_drafted: bool
    ahead: Ahead | None = None
    begun: list[VerifyJob] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Round:
    """What a job is for, its tag: a request, or a round that the sequence began by itself.

    Attributes:
        request_id: 0 without a request.
        received_ns: when its request arrived; None before one does, for a round that was begun here.
        span: around its request.
        continuation: how the sequence goes on after it, or what its own proposal follows.
        is_done: whether its verdict is on its way.
        has_failed: whether it failed before it was confirmed.
    """

    sequence: OpenSequence[_State]
    request_id: int = 0
    received_ns: int | None = None
    span: Span = field(default_factory=Span)
    continuation: Continuation | None = None
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
        if state.begun:
            state.begun.clear()
            state.going = state.going.again()
        if state.ahead is not None:
            state.ahead.commit(order.base_len, order.token_ids)
        asked = _Round(sequence, order.request_id, received_ns, state.spans.serving(order.traceparent))
        job = _job(asked, order.base_len, order.token_ids, order.proposal)
        self.service.engine.submit(job, self._judged, len(order.proposal.token_ids))
        sequence.num_unanswered += 1

    def _confirm(self, sequence: OpenSequence[_State], order: VerifyOrder, received_ns: int) -> None:
        """A request for a round that was begun here; its verdict may be on its way already."""
        rounds = sequence.state.begun
        if not rounds or rounds[0].ahead_id != order.ahead_id:
            raise InvalidRequestError("ahead_ids", order.ahead_id, "is not what the sequence goes on with")
        job = rounds[0]
        sequence.state.going.num_asked += job.ahead_id < 0
        if num_tokens := len(order.token_ids) + len(order.proposal.token_ids):
            raise InvalidRequestError("num_tokens", num_tokens, "must be 0 with an ahead_id")
        if order.base_len != job.committed_len:
            raise InvalidRequestError("base_lens", order.base_len, f"must be {job.committed_len}")
        span = sequence.state.spans.serving(order.traceparent)
        begun: _Round = job.tag
        if begun.is_done:
            del rounds[0]
            sequence.state.spans.finish_at_once(span, order.base_len)
            return
        begun.received_ns, begun.span = received_ns, span
        sequence.num_unanswered += 1
        if begun.has_failed:
            self._begin_again(job)
        else:
            self.service.engine.promote(job)

    def _begin_again(self, failed: VerifyJob) -> None:
        """In the foreground now, as there was no memory to work ahead in."""
        begun: _Round = failed.tag
        begun.has_failed = False
        job = _job(begun, failed.base_len, failed.token_ids, failed.proposal)
        job.ahead_id, job.going, job.wanted = failed.ahead_id, failed.going, failed.wanted
        rounds = begun.sequence.state.begun
        rounds[rounds.index(failed)] = job
        self.service.engine.submit(job, self._judged, len(job.proposal.token_ids))

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
                if not is_open or (job.ahead_id and job not in sequence.state.begun):
                    # Its sequence is closed, or another round took its place.
                    judged.span.fail(tracing.CANCELLED)
                    judged.span.end()
                    continue
                if isinstance(result, SpecwireError):
                    self._fail(job, result)
                    continue
                judged.is_done = True
                if judged.received_ns is not None:
                    sequence.num_unanswered -= 1
                    if job.ahead_id:
                        sequence.state.begun.remove(job)
                judged.continuation = self._gone_on(job) if job.going else self._go_on(job)
                answered.append(job)
        self.answer(answered)

    def _go_on(self, job: VerifyJob) -> Continuation | None:
        """Begin what follows this verdict, if anything is there for it; the verdict stands if that fails."""
        sequence: OpenSequence[_State] = job.tag.sequence
        ahead, rounds = sequence.state.ahead, sequence.state.begun
        if ahead is None or not _has_probs(job.proposal):
            return None
        if len(rounds) >= MAX_AHEAD:  # the coordinator asks for none of them
            return None
        try:
            following = ahead.after(job.proposal, job.result)
            if following is None:
                return None
            continuation, token_ids, proposal = following
            begun = _job(_Round(sequence), job.committed_len, token_ids, proposal)
            begun.ahead_id, begun.worth, begun.goes_on = continuation.ahead_id, 1.0, True
            # In the background: requests of other sequences come first.
            self.service.engine.submit(begun, self._judged, len(proposal.token_ids), background=True)
        except SpecwireError as error:  # such as the end of the context; the coordinator comes to it too
            log.debug("sequence %d does not go on: %s", sequence.sequence_id, error)
            return None
        except Exception:
            log.exception("going on failed")
            return None
        rounds.append(begun)
        return continuation

    def _gone_on(self, job: VerifyJob) -> Continuation | None:
        """Note the round that the engine has begun after this one, if it has; None if nothing is proposed."""
        following, state = job.following, job.tag.sequence.state
        if job.outcome is None or not (following or job.drafted):
            return None
        if following is None:
            return Continuation(0, job.outcome)
        following.tag = _Round(job.tag.sequence)
        self.service.engine.expect(following, self._judged)
        state.begun.append(following)
        if state.ahead is not None:
            state.ahead.commit(following.base_len, following.token_ids)
        return Continuation(following.ahead_id, job.outcome)

    def _fail(self, job: VerifyJob, error: SpecwireError) -> None:
        judged: _Round = job.tag
        if job.ahead_id and judged.received_ns is None:
            judged.has_failed = True
        elif job.worth:  # a background job, just before the engine promoted it
            with self.failing(judged.sequence.sequence_id):
                self._begin_again(job)
        else:
            judged.span.fail(error.status, tracing.described(error))
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
            job.ahead_id,
            judged.continuation,
            proposal=job.drafted,
        )


def _wanted(wanted: Wanted, *, is_drafted: bool) -> Wanted:
    """What is to follow the verdict; no proposal where the service does not draft."""
    counts = wanted.num_draft_tokens, wanted.max_depth, wanted.num_plain
    limits = MAX_NUM_DRAFT_TOKENS, MAX_NUM_DRAFT_TOKENS, MAX_AHEAD
    for name, value, most in zip(verify_wire.WANTED_COLUMNS, counts, limits, strict=True):
        if not 0 <= value <= most:
            raise InvalidRequestError(name, value, f"must lie in [0, {most}]")
    return wanted if is_drafted else replace(wanted, num_draft_tokens=0)


def _job(judged: _Round, base_len: int, token_ids: Sequence[int], proposal: Proposal) -> VerifyJob:
    """The job of a round, with what is to follow its verdict."""
    going = judged.sequence.state.going
    wants = going.wanted.num_draft_tokens or (going.wanted.num_plain and going.goes_on)
    goes_on = going.end_len and wants and _has_probs(proposal)
    return VerifyJob(
        judged.sequence.tokens,
        base_len,
        token_ids,
        proposal=proposal,
        going=going if goes_on else None,
        wanted=going.wanted,
        tag=judged,
    )


def _has_probs(proposal: Proposal) -> bool:
    """Whether the rule can be applied here."""
    return all(len(support.probs) for support in proposal.supports)
