"""The draft service of one sequence, which may be far away, late, or not there at all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from coordinator.generation import Cost, Plan
from coordinator.peers.checks import check_proposal
from coordinator.peers.pool import Pool
from coordinator.peers.prepared import PreparedProposals
from coordinator.peers.replicas import Replica
from coordinator.peers.streams import Call, attributes, cost_of
from specwire.core import Preparation, Proposal, SamplingParams, num_in_common
from specwire.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    PrefixMismatchError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.estimate import clock
from specwire.telemetry import tracing
from specwire.v1 import draft_pb2
from specwire.wire import model as wire

_RETRY_AFTER_MS = 1000
_TIMES_USUAL = 8.0
"""A proposal that takes so many times what it cost before is not worth waiting for, whatever it saves."""
_LOST_AFTER_WAITS = 5.0
"""A draft that has not answered for so many of its longest waits is lost."""


class _DraftStream:
    """Requests go out, and whatever comes back is kept by the tokens that it follows.

    Attributes:
        prepared: proposals that nobody has used yet.
        num_told: committed tokens that the draft was told.
        error: why nothing more will come.
    """

    def __init__(
        self,
        call: Call,
        check: Callable[[Proposal], None] = lambda _: None,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to receive.

        Args:
            check: raises SpecwireError for a proposal that could not be judged.
            answered: called for each answer.
        """
        self._call = call
        self._check = check
        self._answered = answered
        self.num_told = 0
        self._last: Sequence[int] = ()  # what it proposed after them
        self._num_requests = self._num_answered = self._num_late = 0
        self._sent: draft_pb2.DraftRequest | None = None
        self._sent_ns = 0
        self._sending: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._receiving = asyncio.create_task(self._receive())
        self.prepared = PreparedProposals()
        self.error: SpecwireError | None = None
        self._cost = Cost()

    @property
    def late_s(self) -> float:
        """How long an answer has been waited for that nobody waits for any longer; 0 when it has come."""
        is_late = self._num_answered < self._num_late
        return (clock.stopwatch_ns() - self._sent_ns) / 1e9 if is_late else 0.0

    def give_up(self) -> None:
        """The last answer is late: whoever waited for it goes on without."""
        self._num_late = self._num_requests

    async def ask(self, committed: Sequence[int], request: draft_pb2.DraftRequest) -> tuple[Proposal, Cost]:
        """Commit tokens, and wait for what follows them, whether it is the answer or had been prepared.

        Raises:
            SpecwireError: why there is nothing.
        """
        self._num_requests += 1
        request.request_id = self._num_requests
        self._sent, self._sent_ns = request, clock.stopwatch_ns()
        self._send(committed, request)
        while (found := self.prepared.take(committed)) is None:
            if self.error is not None:
                raise self.error
            if self._num_answered == request.request_id:
                raise InternalError(f"the draft answered with nothing that follows {len(committed)} tokens")
            self._arrived.clear()
            await self._arrived.wait()
        num_new = len(request.token_ids) - num_in_common(request.token_ids, self._last)
        self._last = found.token_ids
        answered = self._num_answered == request.request_id
        cost = self._cost if answered else cost_of(request, draft_pb2.DraftResponse(), self._sent_ns)
        return found, replace(cost, num_new_tokens=num_new)

    def tell(self, committed: Sequence[int], proposal: Proposal, request: draft_pb2.DraftRequest) -> None:
        """Commit tokens and let the draft go on from a proposal that it had prepared; waits for nothing."""
        self._send(committed, request)
        self._last = proposal.token_ids

    def _send(self, committed: Sequence[int], request: draft_pb2.DraftRequest) -> None:
        """In the order of the calls; what fails is seen by the receiver."""
        request.base_len, request.token_ids[:] = self.num_told, committed[self.num_told :]
        self.num_told = len(committed)
        self._sending = asyncio.create_task(self._send_after(self._sending, request))

    async def _send_after(self, before: asyncio.Task[None] | None, request: draft_pb2.DraftRequest) -> None:
        if before is not None:
            await before
        await self._call.send(request)

    async def _receive(self) -> None:
        try:
            while True:
                self._take(await self._call.read())
        except SpecwireError as error:
            self.error = error
            self._call.cancel()
        self._arrived.set()

    def _take(self, response: draft_pb2.DraftResponse) -> None:
        if response.request_id:
            self._num_answered = response.request_id
            self._answered()
            if response.request_id == self._num_requests:
                self._cost = cost_of(self._sent, response, self._sent_ns)
        for message in response.proposals:
            try:
                proposal = wire.proposal_from_proto(message, response.base_len)
                self._check(proposal)
            except (InternalError, InvalidRequestError) as error:
                raise InternalError(f"the service sent {error}") from None
            self.prepared.add(list(message.prefix_token_ids), proposal)
        self._arrived.set()

    def close(self) -> None:
        """Cancel the stream; the peer frees its memory, and the receiver sees the end."""
        self._call.cancel()
        if self._sending is not None:  # to a peer that was never reached it would wait for ever
            self._sending.cancel()


class RemoteDrafter:
    """The draft service, which may fail: then proposals are empty, and `unavailable` says why.

    A draft that is lost or hangs costs one bounded wait; the next round takes up another replica, or is a
    plain one. Which replica proposes follows from loads, failures and the clock, never from a token, and a
    proposal comes with the very distributions that it was drawn from: so the law is untouched even where
    replicas run different drafts.
    """

    def __init__(
        self,
        pool: Pool,
        params: SamplingParams,
        prompt_len: int,
        *,
        vocab_limit: int,
        timeout_s: float,
        deadline_s: float | None,
        tracer: tracing.Tracing,
    ) -> None:
        self._pool = pool
        self._open = wire.open_sequence(params, prompt_len, vocab_limit)
        self._check = partial(check_proposal, vocab_size=vocab_limit, matches_tokens=params.matches_tokens)
        self._timeout_s = self._longest_wait_s = timeout_s
        self._deadline_s = deadline_s
        self._tracer = tracer
        self._replica: Replica | None = None
        self._num_lost = 0
        self._stream: _DraftStream | None = None
        self._not_before_s: dict[Replica, float] = {}
        self.unavailable = ""

    async def propose(self, committed: Sequence[int], plan: Plan, parent: str) -> tuple[Proposal, Cost]:
        """See `generation.Drafter`."""
        nothing = Proposal(len(committed))
        if plan.num_draft_tokens <= 0:
            return nothing, Cost()
        replica = self._place(committed)
        if replica is None or replica.info is None:
            return nothing, Cost(away=True)
        wanted = min(plan.num_draft_tokens, replica.info.context_len - len(committed))
        if wanted <= 0:
            return nothing, Cost()
        try:
            return await self._propose_at(replica, committed, wanted, plan, parent) or (nothing, Cost())
        except (SpecwireError, TimeoutError) as error:
            self._lose(replica, error)
            return nothing, Cost(away=True)

    async def _propose_at(
        self, replica: Replica, committed: Sequence[int], wanted: int, plan: Plan, parent: str
    ) -> tuple[Proposal, Cost] | None:
        prepared = self._prepared(committed, wanted, plan, parent)
        if prepared is not None:
            return prepared, Cost(prepared=True)
        if self._is_late():
            return None
        with self._tracer.span("draft", parent=parent) as span:
            proposal, cost = await self._ask(replica, committed, wanted, plan, span.traceparent)
            span.set(attributes(proposal, cost))
        return proposal, cost

    def _place(self, committed: Sequence[int]) -> Replica | None:
        """Where the stream is or may be opened."""
        replica = self._current() or self._pool.choose(committed, self._avoided(), self._open.cache_salt)
        if replica is None:
            self.unavailable = self.unavailable or self._pool.unavailable
        return replica

    def _current(self) -> Replica | None:
        """Where the stream is open, unless others have found out that it is lost."""
        if self._replica is not None and self._replica.num_lost != self._num_lost:
            self.unavailable = self.unavailable or self._replica.unavailable or "it was lost for a while"
            self.close()
        return self._replica

    def _avoided(self) -> set[Replica]:
        if not self._not_before_s:
            return set()
        now_s = clock.stopwatch_ns() / 1e9
        return {replica for replica, not_before_s in self._not_before_s.items() if now_s < not_before_s}

    def _prepared(self, committed: Sequence[int], wanted: int, plan: Plan, parent: str) -> Proposal | None:
        """What is there already; the draft is told, and works on from it."""
        stream = self._stream
        found = stream.prepared.take(committed) if stream else None
        if stream is None or found is None:
            return None
        proposal = found.first(wanted)
        preparation = self._preparation(plan)
        if preparation is not None:
            request = draft_pb2.DraftRequest(traceparent=parent, prepare=preparation)
            stream.tell(committed, proposal, request)
        return proposal

    def _is_late(self) -> bool:
        """Whether the answer to an earlier request is still to come: then nothing more is asked.

        Raises:
            TimeoutError: it has been for too long.
            SpecwireError: it never will.
        """
        if self._stream is None:
            return False
        if self._stream.error:
            raise self._stream.error
        if self._stream.late_s > _LOST_AFTER_WAITS * self._longest_wait_s:
            raise TimeoutError
        return self._stream.late_s > 0

    async def _ask(
        self, replica: Replica, committed: Sequence[int], wanted: int, plan: Plan, traceparent: str
    ) -> tuple[Proposal, Cost]:
        opening = self._stream is None
        if self._stream is None:
            call = replica.open_stream(self._deadline_s)
            self._stream = _DraftStream(call, self._check, replica.answered)
            self._replica, self._num_lost = replica, replica.num_lost
            self._pool.opened(replica, committed, self._open.cache_salt)
        stream = self._stream
        request = draft_pb2.DraftRequest(
            open=self._open if opening else None,
            num_draft_tokens=wanted,
            traceparent=traceparent,
            prepare=self._preparation(plan),
        )
        usual_s = replica.costs.bound((wanted, len(committed) - stream.num_told)) / 1e9
        self._longest_wait_s = max(self._timeout_s, _TIMES_USUAL * usual_s)
        # One that has not answered since it was lost is asked, and not waited for.
        patience_s = min(plan.patience_s, self._longest_wait_s) if replica.is_proven else 0.0
        try:
            async with asyncio.timeout(patience_s):
                found, cost = await stream.ask(committed, request)
        except TimeoutError:
            stream.give_up()
            return Proposal(len(committed)), Cost(given_up=True)
        if cost.forward_ns:
            replica.costs.add((len(found.token_ids), cost.num_new_tokens), max(1, cost.wall_ns))
        return found.first(wanted), cost

    def _preparation(self, plan: Plan) -> draft_pb2.Preparation | None:
        info = self._replica.info if self._replica else None
        if not plan.num_outcomes or info is None or not info.prepares_outcomes:
            return None
        return wire.preparation_to_proto(Preparation(plan.num_outcomes, plan.num_draft_tokens))

    def _lose(self, replica: Replica, error: Exception) -> None:
        """Decode plainly until a draft answers again; a stale prefix just re-opens the stream."""
        self.close()
        if isinstance(error, PrefixMismatchError):
            return
        if isinstance(error, ResourceExhaustedError):  # full, not lost: others may go on with it
            self.unavailable = str(error)
            retry_after_ms = error.retry_after_ms or _RETRY_AFTER_MS
            self._not_before_s[replica] = clock.stopwatch_ns() / 1e9 + retry_after_ms / 1e3
            return
        hung = isinstance(error, TimeoutError) and not isinstance(error, DeadlineExceededError)
        waited_s = _LOST_AFTER_WAITS * self._longest_wait_s
        self.unavailable = f"no proposal within {waited_s * 1e3:.0f} ms" if hung else str(error)
        if hung or isinstance(error, ServiceUnavailableError | InternalError):
            replica.lost(self.unavailable)
        else:  # our own deadline, or a request it refuses: nothing that others would suffer from
            self._not_before_s[replica] = math.inf

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None and self._replica is not None:
            self._stream.close()
            self._pool.closed(self._replica)
        self._stream = self._replica = None
