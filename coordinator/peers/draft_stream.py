"""One sequence's stream to a draft service. Knows no grpc."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.cost import CallOutcome, Cost, split
from coordinator.peers.prepared import Origin, PreparedProposals
from coordinator.peers.streams import Call, cost_of
from specwire import tree
from specwire.core import Proposal
from specwire.errors import InternalError, InvalidRequestError, SpecwireError
from specwire.estimate import clock
from specwire.v1 import common_pb2, draft_pb2
from specwire.wire import model as wire


class DraftStream:
    """Sends requests in order, and keeps the proposals that arrive by the tokens that they follow.

    Attributes:
        prepared: proposals that no round has used yet.
        num_sent_tokens: committed tokens that the draft was sent.
        error: why nothing more will arrive; None while the stream is open.
    """

    def __init__(
        self,
        call: Call,
        check: Callable[[Proposal], None] = lambda _: None,
        on_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to receive.

        Args:
            check: raises SpecwireError for a proposal that could not be judged.
            on_answer: called for each answer.
        """
        self._call = call
        self._check = check
        self._on_answer = on_answer
        self.num_sent_tokens = 0
        self._last_proposed = Proposal(0)  # after the committed tokens that were sent
        self._num_requests = self._num_answered = self._num_abandoned = 0
        self._asked: draft_pb2.DraftRequest | None = None
        self._asked_ns = 0
        self._sending: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._receiving = asyncio.create_task(self._receive())
        self.prepared = PreparedProposals()
        self.error: SpecwireError | None = None
        self._cost = Cost()

    @property
    def late_s(self) -> float:
        """How long ago the abandoned request was sent, in seconds; 0 once it is answered."""
        is_late = self._num_answered < self._num_abandoned
        return (clock.stopwatch_ns() - self._asked_ns) / 1e9 if is_late else 0.0

    def abandon(self) -> None:
        """Stop waiting for the last answer; it is late from now on."""
        self._num_abandoned = self._num_requests

    async def request(
        self, committed: Sequence[int], message: draft_pb2.DraftRequest
    ) -> tuple[Proposal, Cost]:
        """Commit tokens, and wait for a proposal that follows them, be it the answer or a prepared one.

        Raises:
            SpecwireError: the stream failed, or the answer does not follow the tokens.
        """
        self._send(committed, message)
        self._asked, self._asked_ns = message, clock.stopwatch_ns()
        while (found := self.prepared.take(committed)) is None:
            if self.error is not None:
                raise self.error
            if self._num_answered == message.request_id:
                raise InternalError(f"the draft answered with nothing that follows {len(committed)} tokens")
            self._arrived.clear()
            await self._arrived.wait()
        num_drafted = tree.num_in_common(self._last_proposed, message.token_ids)
        self._last_proposed = found.proposal
        answered = self._num_answered == message.request_id
        cost = self._cost if answered else self._cost_of_pushed(found.origin)
        return found.proposal, replace(cost, num_prefill_tokens=len(message.token_ids) - num_drafted)

    def _cost_of_pushed(self, origin: Origin) -> Cost:
        """Of the request that was sent last, which a prepared proposal has made unnecessary.

        Where the request had arrived when the proposal was sent, the draft worked on since; else the
        proposal was on its way already.
        """
        assert self._asked is not None
        had_arrived = origin.last_request_id >= self._asked.request_id
        age_ns = origin.request_age_ns if had_arrived else 0
        on_path_ns = min(origin.forward_ns, age_ns)
        timings = common_pb2.Timings(
            residence_ns=age_ns, forward_ns=on_path_ns, ahead_ns=origin.forward_ns - on_path_ns
        )
        return replace(
            split(clock.stopwatch_ns() - self._asked_ns, timings),
            outcome=CallOutcome.BEGUN,
            request_bytes=self._asked.ByteSize(),
            prepared_by=origin.traceparent,
        )

    def continue_from(
        self, committed: Sequence[int], proposal: Proposal, message: draft_pb2.DraftRequest
    ) -> None:
        """Commit tokens, and let the draft work on from a proposal that it had prepared; returns at once."""
        self._send(committed, message)
        self._last_proposed = proposal

    def _send(self, committed: Sequence[int], message: draft_pb2.DraftRequest) -> None:
        """In the order of the calls; the receiver learns why a message could not be sent."""
        self._num_requests += 1
        message.request_id = self._num_requests
        message.base_len, message.token_ids[:] = self.num_sent_tokens, committed[self.num_sent_tokens :]
        self.num_sent_tokens = len(committed)
        self._sending = asyncio.create_task(self._send_after(self._sending, message))

    async def _send_after(self, before: asyncio.Task[None] | None, message: draft_pb2.DraftRequest) -> None:
        if before is not None:
            await before
        await self._call.send(message)

    async def _receive(self) -> None:
        try:
            while True:
                self._process(await self._call.read())
        except SpecwireError as error:
            self.error = error
            self._call.cancel()
        self._arrived.set()

    def _process(self, response: draft_pb2.DraftResponse) -> None:
        if response.request_id:
            self._num_answered = response.request_id
            self._on_answer()
            if self._asked is not None and response.request_id == self._asked.request_id:
                cost = cost_of(self._asked, response, self._asked_ns)
                self._cost = replace(cost, outcome=CallOutcome.BEGUN) if response.begun_ahead else cost
        for message in response.proposals:
            try:
                proposal = wire.proposal_from_proto(message, response.base_len)
                self._check(proposal)
            except (InternalError, InvalidRequestError) as error:
                raise InternalError(f"the service sent {error}") from None
            self.prepared.add(list(message.prefix_token_ids), proposal, _origin(response, message))
        self._arrived.set()

    def close(self) -> None:
        """Cancel the stream; the peer frees its memory, and the receiver sees the end."""
        self._call.cancel()
        if self._sending is not None:  # without a connection it would never end
            self._sending.cancel()


def _origin(response: draft_pb2.DraftResponse, proposal: draft_pb2.Proposal) -> Origin:
    return Origin(
        forward_ns=proposal.forward_ns,
        last_request_id=response.last_request_id,
        request_age_ns=max(0, response.last_request_age_ns),
        traceparent=response.traceparent,
    )
