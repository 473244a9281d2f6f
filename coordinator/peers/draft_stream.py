"""One sequence's stream to a draft service. Knows no grpc."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.generation import Cost
from coordinator.peers.prepared import PreparedProposals
from coordinator.peers.streams import Call, cost_of
from specwire.core import Proposal, num_in_common
from specwire.errors import InternalError, InvalidRequestError, SpecwireError
from specwire.estimate import clock
from specwire.v1 import draft_pb2
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
        self._last_proposed: Sequence[int] = ()  # after the committed tokens that were sent
        self._num_requests = self._num_answered = self._num_abandoned = 0
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
        """How long ago the abandoned request was sent, in seconds; 0 once it is answered."""
        is_late = self._num_answered < self._num_abandoned
        return (clock.stopwatch_ns() - self._sent_ns) / 1e9 if is_late else 0.0

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
        self._num_requests += 1
        message.request_id = self._num_requests
        self._sent, self._sent_ns = message, clock.stopwatch_ns()
        self._send(committed, message)
        while (found := self.prepared.take(committed)) is None:
            if self.error is not None:
                raise self.error
            if self._num_answered == message.request_id:
                raise InternalError(f"the draft answered with nothing that follows {len(committed)} tokens")
            self._arrived.clear()
            await self._arrived.wait()
        num_prefill_tokens = len(message.token_ids) - num_in_common(message.token_ids, self._last_proposed)
        self._last_proposed = found.token_ids
        answered = self._num_answered == message.request_id
        cost = self._cost if answered else cost_of(message, draft_pb2.DraftResponse(), self._sent_ns)
        return found, replace(cost, num_prefill_tokens=num_prefill_tokens)

    def continue_from(
        self, committed: Sequence[int], proposal: Proposal, message: draft_pb2.DraftRequest
    ) -> None:
        """Commit tokens, and let the draft work on from a proposal that it had prepared; returns at once."""
        self._send(committed, message)
        self._last_proposed = proposal.token_ids

    def _send(self, committed: Sequence[int], message: draft_pb2.DraftRequest) -> None:
        """In the order of the calls; the receiver learns why a message could not be sent."""
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
        if self._sending is not None:  # without a connection it would never end
            self._sending.cancel()
