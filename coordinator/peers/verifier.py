"""The verify service for one sequence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.cost import CallOutcome, Cost, split
from coordinator.peers.attempts import RETRY_AFTER_MS, Attempts
from coordinator.peers.checks import check_proposal, check_verdict
from coordinator.peers.pool import Pool
from coordinator.peers.replicas import Replica
from coordinator.peers.streams import describe, span_around
from coordinator.requests import GenerationRequest
from specwire import clock
from specwire.core import MAX_NUM_DRAFT_TOKENS, Continuation, Outcome, Proposal, Timings, Verdict, Wanted
from specwire.errors import (
    InternalError,
    PrefixMismatchError,
    ResourceExhaustedError,
    ServiceDrainingError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.proposals import tree
from specwire.proposals.prepared import PreparedProposals
from specwire.rpc.wire import model as wire
from specwire.rpc.wire import proposals
from specwire.rpc.wire.verify import AheadOrder, VerifyAnswer, VerifyOrder
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.v1 import common_pb2

log = logging.getLogger(__name__)

_MAY_BE_RETRIED = (PrefixMismatchError, ServiceUnavailableError, ResourceExhaustedError)

_NOT_ASKED = "the service answers what it was not asked"
_MAX_AHEAD = 128
"""Proposals ahead of a sequence that are remembered: the 64 that the peer keeps, and those on their way. And
most answers to them that may come before they are asked for."""
_Received = tuple[VerifyAnswer, int]
"""An answer, and its share of its message in bytes."""

PLAIN_AHEAD = 16
"""Rounds without draft tokens that the service may begin before they are asked for: as many as it holds
results for, and those on their way. With 8, one stream of the embedded target has 333 tokens/s, not 400."""


class _VerifySequence:
    """A `link.Receiver`, one sequence at a replica: sends one request at a time, and waits for its answer.

    Attributes:
        replica: where it is.
        num_sent_tokens: committed tokens that the peer was sent.
        request_bytes: see `link.Receiver`.
    """

    def __init__(self, replica: Replica, opening: common_pb2.OpenSequence, timeout_s: float | None) -> None:
        self.replica = replica
        self.num_sent_tokens = self.request_bytes = 0
        self._link = replica.link()
        self._num_requests = self._last_ahead_id = 0
        self._error: SpecwireError | None = None
        self._asked: VerifyOrder | None = None
        self._answer: asyncio.Future[_Received] | None = None
        self._early: dict[int, _Received] = {}  # to rounds that were not asked for yet
        self._ahead = PreparedProposals(_MAX_AHEAD)
        self._last_own_id = 0  # of the proposals that the peer makes itself, and goes on with
        self._sequence_id = self._link.open(opening, self, timeout_s)

    def rewind(self, length: int) -> None:
        """The peer is to keep no more than so many of the committed tokens."""
        self.num_sent_tokens = min(self.num_sent_tokens, length)

    async def ask(
        self,
        committed: Sequence[int],
        proposal: Proposal,
        traceparent: str,
        wanted: Wanted,
        ahead_id: int = 0,
    ) -> tuple[VerifyAnswer, Cost]:
        """Send a request and wait for its answer.

        Args:
            ahead_id: of the round that the peer began by itself, to which the answer may be there: it has the
                tokens and the proposal. 0 for another one: answers to rounds that it began are dropped.

        Raises:
            SpecwireError: as the peer raised it, or for a failure of the transport.
        """
        if self._error is not None:
            raise self._error
        base_len = len(committed) if ahead_id else self.num_sent_tokens
        if not ahead_id:
            self._early.clear()
        self._num_requests += 1
        self.num_sent_tokens = len(committed)
        order = VerifyOrder(
            self._sequence_id,
            self._num_requests,
            base_len,
            committed[base_len:],
            Proposal(base_len) if ahead_id else proposal,
            traceparent,
            ahead_id,
            wanted,
            needs_probs=bool(self._last_ahead_id or wanted.num_draft_tokens),
        )
        started_ns = clock.stopwatch_ns()
        self._link.put(order)
        found = self._early.pop(ahead_id, None)
        if found is None:
            self._asked, self._answer = order, asyncio.get_running_loop().create_future()
            found = await self._answer
        answer, num_bytes = found
        cost = split(
            CallOutcome.BEGUN if answer.ahead_id else CallOutcome.ASKED,
            clock.stopwatch_ns() - started_ns,
            _as_asked(answer.timings) if answer.ahead_id else answer.timings,
            self.request_bytes,
            num_bytes,
            answer.num_cached_tokens,
            0,
            answer.load,
        )
        return answer, cost

    def prepare(self, path: Sequence[int], proposal: Proposal) -> None:
        """Send a proposal ahead of the verdict that it depends on."""
        self._last_ahead_id += 1
        self._ahead.add(path, proposal, self._last_ahead_id)
        order = AheadOrder(self._sequence_id, self._last_ahead_id, path, proposal)
        self._link.push(order, proposals.num_bytes(path, proposal, proposal.support_len))

    def begun(self, committed: Sequence[int], continuation: Continuation | None) -> Proposal | None:
        """What the peer judges next; None if that does not follow the committed tokens.

        To be called for each round: proposals that cannot follow any more are dropped.
        """
        return self._ahead.find(continuation.ahead_id if continuation else 0, committed)

    def received(self, answer: VerifyAnswer, num_bytes: int) -> None:
        asked, waiting = self._asked, self._answer
        if answer.continuation is not None:
            self._last_own_id = min(self._last_own_id, answer.continuation.ahead_id)
        is_asked = asked is not None and (
            answer.ahead_id == asked.ahead_id if answer.ahead_id else answer.request_id == asked.request_id
        )
        if is_asked and waiting is not None and not waiting.done():
            waiting.set_result((answer, num_bytes))
        elif self._last_own_id <= answer.ahead_id <= self._last_ahead_id and answer.ahead_id:
            self._early[answer.ahead_id] = answer, num_bytes
            if len(self._early) > _MAX_AHEAD:
                self.failed(ServiceUnavailableError(_NOT_ASKED))
        elif not is_asked:  # the answer to what was asked may not come any more
            self.failed(ServiceUnavailableError(_NOT_ASKED))

    def failed(self, error: SpecwireError) -> None:
        self._error = error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        """Close it; the peer frees its memory."""
        self._link.close_sequence(self._sequence_id)


def _as_asked(timings: Timings) -> Timings:
    """Timings of a round that the service began by itself, as if it had begun when it was asked for.

    It began when the verdict before it left, which is about when the coordinator began to wait. When the
    request arrived there does not matter: the pass was under way.
    """
    forward_ns = timings.forward_ns + timings.ahead_ns
    residence_ns = max(timings.residence_ns, forward_ns)
    return timings._replace(forward_ns=forward_ns, residence_ns=residence_ns, ahead_ns=0)


class RemoteVerifier:
    """The verify service: one sequence at one of its replicas, and at another one when that is lost.

    A verdict counts once `verify` has returned it, and its tokens are committed before the next request: so a
    new sequence begins with exactly the tokens that the client has or will get, and the second verdict on a
    proposal equals the first one, up to rounding. docs/failover.md says why the text is the same.
    """

    def __init__(
        self,
        pool: Pool,
        request: GenerationRequest,
        *,
        remaining_s: Callable[[], float | None],
        timeout_s: float,
        tracer: tracing.Tracing,
        parent: tracing.Span,
        goes_on: bool = False,
        max_depth: int = MAX_NUM_DRAFT_TOKENS,
        drafts: bool = False,
    ) -> None:
        """Opens nothing yet.

        Args:
            remaining_s: until the deadline of the request; None without one.
            timeout_s: longest wait for a replica when none is available.
            parent: span of the generation.
            goes_on: whether the target may go on by itself, with prepared proposals or without any.
            max_depth: longest path of draft tokens that it may do so with: the client's credit has room for
                no longer round.
            drafts: whether it is asked to propose by itself.
        """
        self._pool = pool
        self._params = request.keyed_params
        self._remaining_s = remaining_s
        self._timeout_s = timeout_s
        self._tracer = tracer
        self._opening = wire.open_sequence(
            self._params,
            request.prompt_len,
            trace_headers=tracer.propagators.headers(parent.context),
            may_go_on=goes_on,
            end_len=request.prompt_len + (request.params.max_tokens or 0) if drafts or goes_on else 0,
        )
        self._goes_on, self._max_depth, self._is_drafted = goes_on, max_depth, drafts
        self._end_len = request.prompt_len + (request.params.max_tokens or 0)
        self._source = request.target.own_source
        self._wanted = Wanted()
        self._drafted: Proposal | None = None
        self._continuation: Continuation | None = None
        self._begun: Proposal | None = None
        self._sequence: _VerifySequence | None = None
        self._has_begun = False

    async def verify(
        self, committed: Sequence[int], proposal: Proposal, parent: tracing.Span, *, is_plain: bool = False
    ) -> tuple[Verdict, Cost]:
        """See `generation.Verifier`.

        Raises:
            SpecwireError: no target is available, or it refused the request.
        """
        started_ns, lost_ns = clock.stopwatch_ns(), 0
        num_plain = PLAIN_AHEAD if is_plain and self._goes_on else 0
        if num_plain != self._wanted.num_plain:
            self._wanted = replace(self._wanted, num_plain=num_plain)
        attempts: Attempts | None = None  # a round without failures needs none
        while True:
            sequence = self._sequence
            if sequence is None:
                attempts = attempts or Attempts(self._timeout_s, self._remaining_s)
                sequence = await self._open(committed, attempts)
                if attempts.has_waited:
                    lost_ns = clock.stopwatch_ns() - started_ns
            try:
                verdict, cost = await self._attempt(sequence, committed, proposal, parent)
            except _MAY_BE_RETRIED as error:
                attempts = attempts or Attempts(self._timeout_s, self._remaining_s)
                self._lose(sequence.replica, error, attempts, parent)
            else:
                if lost_ns:
                    cost = replace(cost, wall_ns=cost.wall_ns + lost_ns, lost_ns=lost_ns)
                return verdict, cost

    def _lose(self, replica: Replica, error: SpecwireError, attempts: Attempts, parent: tracing.Span) -> None:
        """The sequence at a replica failed.

        Raises:
            SpecwireError: it is not worth another attempt.
        """
        log.warning("verify at %s: %s", replica.address, error)
        self.close()
        if isinstance(error, ServiceDrainingError):
            replica.mark_unavailable(str(error))
        elif isinstance(error, ServiceUnavailableError):
            replica.mark_lost(str(error))
        parent.event("verify lost", {names.SERVER_ADDRESS: replica.address, names.ERROR_TYPE: error.status})
        attempts.add(replica, error)

    async def _attempt(
        self, sequence: _VerifySequence, committed: Sequence[int], proposal: Proposal, parent: tracing.Span
    ) -> tuple[Verdict, Cost]:
        if self._tracer.enabled:
            with span_around(self._tracer, "verify", sequence.replica.address, parent) as span:
                verdict, cost = await self._ask(sequence, committed, proposal, span.traceparent)
                describe(span, proposal, cost)
        else:
            verdict, cost = await self._ask(sequence, committed, proposal, parent.traceparent)
        self._has_begun = True
        sequence.replica.mark_proven()
        return verdict, cost

    async def _open(self, committed: Sequence[int], attempts: Attempts) -> _VerifySequence:
        """A new sequence. If all replicas are full, only a generation that has begun waits for one."""
        salt = self._params.cache_salt
        while True:
            replica = self._pool.choose(committed, attempts.failed | attempts.full, salt)
            replica = replica or self._pool.choose(committed, attempts.full, salt)
            if replica is not None:
                self._sequence = _VerifySequence(replica, self._opening, self._remaining_s())
                self._pool.opened(replica, committed, salt)
                return self._sequence
            wait_s = attempts.wait_s()
            is_new = not self._has_begun and not attempts.num_failures
            if wait_s <= 0 or (attempts.full and is_new):
                raise attempts.give_up(self._pool.unavailable, self._pool.expected_s())
            if attempts.full:
                await asyncio.sleep(min(wait_s, RETRY_AFTER_MS / 1e3))
                attempts.full.clear()
            else:
                await self._pool.wait(wait_s)

    async def _ask(
        self, sequence: _VerifySequence, committed: Sequence[int], proposal: Proposal, traceparent: str
    ) -> tuple[Verdict, Cost]:
        begun, continuation, wanted = self._begun, self._continuation, self._wanted
        self._begun = self._continuation = self._drafted = None
        ahead_id = continuation.ahead_id if begun is proposal and continuation is not None else 0
        answer, cost = await sequence.ask(committed, proposal, traceparent, wanted, ahead_id)
        try:
            check_verdict(answer.verdict, proposal)
            self._drafted = self._own(answer.proposal)
        except InternalError as error:  # another replica may give a valid answer
            raise ServiceUnavailableError(f"the service sent {error}") from None
        self._continuation = answer.continuation
        return answer.verdict, cost

    # --- rounds that the target begins by itself ------------------------------------------------------

    def prepare(self, path: Sequence[int], proposal: Proposal) -> None:
        """Send a prepared proposal ahead, as far as the generation may get."""
        num_tokens, room = len(proposal.token_ids), self._end_len - 1 - (proposal.base_len + len(path))
        if self._goes_on and self._sequence is not None and num_tokens and room > 0:
            self._sequence.prepare(path, tree.within(proposal, num_tokens, min(room, self._max_depth)))

    def begun(self, committed: Sequence[int], outcome: Outcome) -> Proposal | None:
        """See `generation.Verifier`.

        The target applies the same rule to the same numbers. If it comes to another outcome, ours holds: its
        round is dropped by our next request, and it is not trusted to go on by itself again.
        """
        if self._sequence is None or not (self._goes_on or self._drafted):
            return None
        continuation = self._continuation
        if continuation is not None and continuation.ahead_id < 0 and self._goes_on:
            self._begun = self._drafted or Proposal(len(committed))
        else:
            self._begun = self._sequence.begun(committed, continuation)
        theirs = continuation.outcome if continuation else outcome
        if list(theirs.path) == list(outcome.path) and theirs.next_token == outcome.next_token:
            return self._begun
        self._pool.num_disagreements += 1
        self._goes_on, self._begun, self._drafted = False, None, None
        log.error("internal error: verify came to %s where the rule says %s", theirs, outcome)
        return None

    def rewind(self, length: int) -> None:
        """The service is to keep no more than so many of the committed tokens."""
        if self._sequence is not None:
            self._sequence.rewind(length)

    def close(self) -> None:
        """Close the sequence; a later round opens another one."""
        if self._sequence is not None:
            self._sequence.close()
            self._pool.closed(self._sequence.replica)
        self._sequence = self._continuation = self._begun = self._drafted = None

    # --- proposals that the target makes by itself ----------------------------------------------------

    def want(self, num_draft_tokens: int, max_depth: int) -> None:
        """What it is to propose after verdicts, from the next request on; nothing for 0 draft tokens."""
        self._wanted = Wanted(num_draft_tokens, max_depth)  # `verify` says whether rounds may be plain

    def drafted(self, committed: Sequence[int]) -> Proposal | None:
        """What it proposed after the last verdict; None if nothing that follows the committed tokens."""
        found = self._drafted
        return found if found is not None and found.base_len == len(committed) else None

    def _own(self, proposal: Proposal | None) -> Proposal | None:
        """The target's own proposal.

        Raises:
            InternalError: none was asked for, or it is of another kind.
        """
        if proposal is None:
            return None
        if not self._is_drafted:
            raise InternalError("a proposal that was not asked for")
        matches = self._params.matches_tokens
        check_proposal(proposal, matches_tokens=matches, may_be_tree=matches)
        return replace(proposal, source=self._source)
