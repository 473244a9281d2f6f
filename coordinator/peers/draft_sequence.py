"""One sequence at a draft service. Knows no grpc."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.cost import CallOutcome, Cost, split
from coordinator.generation import Plan
from coordinator.peers.replicas import Replica
from coordinator.peers.waits import Waits
from specwire import clock
from specwire.core import MAX_NUM_OUTCOMES, Preparation, Proposal, Timings
from specwire.errors import InternalError, ServiceUnavailableError, SpecwireError
from specwire.proposals import tree
from specwire.proposals.prepared import PreparedProposals
from specwire.rpc.wire.draft import DraftAnswer, DraftOrder, PreparedAnswer
from specwire.v1 import common_pb2

ASKED = PreparedAnswer(0, (), Proposal(0), 0, 0, 0)
"""The origin of a proposal that is the answer to a request."""
_NOTHING = Plan(0)
_MAX_PREPARED = 2 * MAX_NUM_OUTCOMES
"""Proposals that are kept: those for the last request, and for the one before."""


class DraftSequence:
    """A `link.Receiver`: sends requests in order, and keeps the proposals that arrive by what they follow.

    Attributes:
        replica, num_lost: where it is, and how often that had been lost when it was opened.
        prepared: proposals that no round has used yet.
        num_sent_tokens: committed tokens that the draft was sent.
        error: why nothing more will arrive; None while the sequence is open.
        request_bytes: see `link.Receiver`.
        message_number: of the message with the last answer, among those of all sequences of the link.
    """

    def __init__(
        self,
        replica: Replica,
        opening: common_pb2.OpenSequence,
        timeout_s: float | None,
        *,
        waits: Waits,
        check: Callable[[Proposal], None] = lambda _: None,
        on_prepared: Callable[[Sequence[int], Proposal], None] = lambda path, proposal: None,
    ) -> None:
        """Open it.

        Args:
            timeout_s: its deadline, in seconds from now; None for none.
            check: raises SpecwireError for a proposal that could not be judged.
            on_prepared: called for each proposal that was prepared, with the path that it follows.
        """
        self.replica, self.num_lost = replica, replica.num_lost
        self._link = replica.link()
        self._waits = waits
        self._check = check
        self._on_prepared = on_prepared
        self.num_sent_tokens = 0
        self.request_bytes = self.message_number = 0
        self._last_proposed = Proposal(0)  # after the committed tokens that were sent
        self._num_requests = self._num_answered = self._num_abandoned = 0
        self._asked_id = self._asked_ns = 0
        self._arrival: asyncio.Future[None] | None = None
        self.prepared = PreparedProposals(_MAX_PREPARED)
        self.error: SpecwireError | None = None
        self._answer: DraftAnswer | None = None
        self._answered_ns = self._answer_bytes = 0
        self._sequence_id = self._link.open(opening, self, timeout_s)

    @property
    def late_s(self) -> float:
        """How long ago the abandoned request was sent, in seconds; 0 once it is answered."""
        is_late = self._num_answered < self._num_abandoned
        return (clock.stopwatch_ns() - self._asked_ns) / 1e9 if is_late else 0.0

    def num_prefill_tokens(self, committed: Sequence[int]) -> int:
        """Committed tokens that the draft has to run before it drafts: neither sent nor proposed before."""
        token_ids = committed[self.num_sent_tokens :]
        return len(token_ids) - tree.num_in_common(self._last_proposed, token_ids)

    def abandon(self) -> None:
        """Stop waiting for the last answer; it is late from now on."""
        self._num_abandoned = self._num_requests

    async def request(
        self,
        committed: Sequence[int],
        plan: Plan,
        preparation: Preparation | None = None,
        *,
        timeout_s: float,
        traceparent: str = "",
    ) -> tuple[Proposal, Cost]:
        """Commit tokens, and wait for a proposal that follows them, be it the answer or a prepared one.

        Raises:
            SpecwireError: the sequence failed, or the answer does not follow the tokens.
            TimeoutError: nothing arrived in time.
        """
        if self.error is not None:
            raise self.error
        num_prefill_tokens = self.num_prefill_tokens(committed)
        self._put(committed, plan, preparation, traceparent)
        self._asked_id, self._asked_ns = self._num_requests, clock.stopwatch_ns()
        due_ns = self._asked_ns + timeout_s * 1e9
        while (found := self.prepared.take(committed)) is None:
            if self.error is not None:
                raise self.error
            if self._num_answered == self._asked_id:
                raise InternalError(f"the draft answered with nothing that follows {len(committed)} tokens")
            self._arrival = asyncio.get_running_loop().create_future()
            await self._waits.of(self._arrival, timeout_s)
            timeout_s = (due_ns - clock.stopwatch_ns()) / 1e9
        self._last_proposed = found.proposal
        if self._num_answered == self._asked_id:
            return found.proposal, self._cost_of_answer(num_prefill_tokens)
        return found.proposal, self._cost_of_pushed(found.origin, num_prefill_tokens)

    def _cost_of_answer(self, num_prefill_tokens: int) -> Cost:
        """Of the request that was sent last, and is answered."""
        answer = self._answer
        assert answer is not None
        return split(
            CallOutcome.BEGUN if answer.begun_ahead else CallOutcome.ASKED,
            self._answered_ns - self._asked_ns,
            answer.timings,
            self.request_bytes,
            self._answer_bytes,
            answer.num_cached_tokens,
            num_prefill_tokens,
        )

    def _cost_of_pushed(self, origin: PreparedAnswer, num_prefill_tokens: int) -> Cost:
        """Of the request that was sent last, which a prepared proposal has made unnecessary.

        Where the request had arrived when the proposal was sent, the draft worked on since; else the
        proposal was on its way already.
        """
        had_arrived = origin.last_request_id >= self._asked_id
        age_ns = origin.last_request_age_ns if had_arrived else 0
        on_path_ns = min(origin.forward_ns, age_ns)
        timings = Timings(residence_ns=age_ns, forward_ns=on_path_ns, ahead_ns=origin.forward_ns - on_path_ns)
        cost = split(CallOutcome.BEGUN, clock.stopwatch_ns() - self._asked_ns, timings, self.request_bytes)
        return replace(cost, num_prefill_tokens=num_prefill_tokens, prepared_by=origin.traceparent)

    def rewind(self, length: int) -> None:
        """The peer is to keep no more than so many committed tokens; what followed others is forgotten."""
        self.num_sent_tokens = min(self.num_sent_tokens, length)
        self.prepared = PreparedProposals(_MAX_PREPARED)
        self._last_proposed = Proposal(0)

    def continue_from(self, committed: Sequence[int], proposal: Proposal, preparation: Preparation) -> None:
        """Commit tokens, and let the draft work on from a proposal that it had prepared; returns at once."""
        self._put(committed, _NOTHING, preparation, "")
        self._last_proposed = proposal

    def _put(
        self, committed: Sequence[int], plan: Plan, preparation: Preparation | None, traceparent: str
    ) -> None:
        base_len, self.num_sent_tokens = self.num_sent_tokens, len(committed)
        self._num_requests += 1
        asked = self._sequence_id, self._num_requests, base_len, committed[base_len:]
        wanted = plan.num_draft_tokens, plan.max_depth, preparation
        self._link.put(DraftOrder(*asked, *wanted, traceparent, plan.num_chains))

    def received(self, answer: DraftAnswer | PreparedAnswer, num_bytes: int) -> None:
        proposal = answer.proposal
        try:
            self._check(proposal)
        except InternalError as error:
            self.failed(InternalError(f"the service sent {error}"))
            self._link.close_sequence(self._sequence_id)
            return
        if isinstance(answer, DraftAnswer):
            self._num_answered = answer.request_id
            self.message_number = self._link.num_received
            self.replica.mark_proven()
            if answer.request_id == self._asked_id:
                self._answer, self._answer_bytes = answer, num_bytes
                self._answered_ns = clock.stopwatch_ns()
            if proposal.token_ids:
                self.prepared.add((), proposal, ASKED)
        else:
            self.prepared.add(answer.path, proposal, answer)
            self._on_prepared(answer.path, proposal)
        self._wake()

    def failed(self, error: SpecwireError) -> None:
        self.error = self.error or error
        self._wake()

    def _wake(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def close(self) -> None:
        """Close it; the peer frees its memory, and a wait for a proposal ends."""
        self._link.close_sequence(self._sequence_id)
        self.failed(ServiceUnavailableError("the sequence was closed"))
