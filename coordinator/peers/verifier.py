"""The verify service for one sequence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.cost import Cost
from coordinator.peers.attempts import RETRY_AFTER_MS, Attempts
from coordinator.peers.checks import check_verdict
from coordinator.peers.pool import Pool
from coordinator.peers.replicas import Replica
from coordinator.peers.streams import Call, cost_of, describe, span_around
from coordinator.requests import GenerationRequest
from specwire.core import Proposal, Verdict
from specwire.errors import (
    InternalError,
    InvalidRequestError,
    PrefixMismatchError,
    ResourceExhaustedError,
    ServiceUnavailableError,
)
from specwire.estimate import clock
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.v1 import verify_pb2
from specwire.wire import model as wire

log = logging.getLogger(__name__)


class _VerifyStream:
    """Sends one request at a time, and waits for its answer.

    Attributes:
        num_sent_tokens: committed tokens that the peer was sent.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._num_requests = 0
        self.num_sent_tokens = 0

    async def exchange(self, request: verify_pb2.VerifyRequest) -> tuple[verify_pb2.VerifyResponse, Cost]:
        """Send one request and wait for its answer; answers to earlier requests are dropped.

        Raises:
            SpecwireError: as the peer raised it, or for a failure of the transport.
        """
        self._num_requests += 1
        request.request_id = self._num_requests
        started_ns = clock.stopwatch_ns()
        await self._call.send(request)
        response = await self._call.read()
        while response.request_id != self._num_requests:
            response = await self._call.read()
        return response, cost_of(request, response, started_ns)

    def close(self) -> None:
        """Cancel the stream; the peer frees its memory."""
        self._call.cancel()


class RemoteVerifier:
    """The verify service: one stream to one of its replicas, and to another one when that is lost.

    Why reopening a stream does not change the text. A verdict counts once `verify` has returned it, and its
    tokens are committed before the next request; so the new stream begins with exactly the tokens that the
    client has or will get, and no index is repeated or skipped. A failure can only lose an answer that was
    not used. Its proposal is verified again unchanged: target tokens are drawn with noise that is a function
    of (seed, position, purpose, base), and so are acceptance and residual in the coordinator. The second
    verdict therefore equals the first one, up to rounding, and is not a second draw that would favour
    outcomes which fail quickly. A late answer is never read: each stream has its own call, which was
    cancelled.
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
    ) -> None:
        """Opens nothing yet.

        Args:
            remaining_s: until the deadline of the request; None without one.
            timeout_s: longest wait for a replica when none is available.
            parent: span of the generation.
        """
        self._pool = pool
        self._params = request.keyed_params
        self._prompt_len = request.prompt_len
        self._remaining_s = remaining_s
        self._timeout_s = timeout_s
        self._tracer = tracer
        self._headers = tracer.propagators.headers(parent.context)
        self._replica: Replica | None = None
        self._stream: _VerifyStream | None = None
        self._has_begun = False

    async def verify(
        self, committed: Sequence[int], proposal: Proposal, parent: tracing.Span
    ) -> tuple[Verdict, Cost]:
        """See `generation.Verifier`.

        Raises:
            SpecwireError: no target is available, or it refused the request.
        """
        attempts = Attempts(self._timeout_s, self._remaining_s)
        started_ns, lost_ns = clock.stopwatch_ns(), 0
        while True:
            replica = self._replica or await self._find(committed, attempts)
            if attempts.has_waited:
                lost_ns = clock.stopwatch_ns() - started_ns
            try:
                verdict, cost = await self._attempt(replica, committed, proposal, parent)
            except (PrefixMismatchError, ServiceUnavailableError, ResourceExhaustedError) as error:
                log.warning("verify stream at %s: %s", replica.address, error)
                self.close()
                if isinstance(error, ServiceUnavailableError):
                    replica.mark_lost(str(error))
                lost = {names.SERVER_ADDRESS: replica.address, names.ERROR_TYPE: error.status}
                parent.event("verify lost", lost)
                attempts.add(replica, error)
            else:
                self._has_begun = True
                replica.mark_proven()
                return verdict, replace(cost, wall_ns=cost.wall_ns + lost_ns, lost_ns=lost_ns)

    async def _attempt(
        self, replica: Replica, committed: Sequence[int], proposal: Proposal, parent: tracing.Span
    ) -> tuple[Verdict, Cost]:
        with span_around(self._tracer, "verify", replica.address, parent) as span:
            verdict, cost = await self._ask(replica, committed, proposal, span.traceparent)
            describe(span, proposal, cost)
        return verdict, cost

    async def _find(self, committed: Sequence[int], attempts: Attempts) -> Replica:
        """A replica for a new stream. If all are full, only a generation that has begun waits for one."""
        while True:
            salt = self._params.cache_salt
            replica = self._pool.choose(committed, attempts.failed | attempts.full, salt)
            replica = replica or self._pool.choose(committed, attempts.full, salt)
            if replica is not None:
                return replica
            wait_s = attempts.wait_s()
            is_new = not self._has_begun and not attempts.has_failed
            if wait_s <= 0 or (attempts.full and is_new):
                raise attempts.give_up(self._pool.unavailable)
            if attempts.full:
                await asyncio.sleep(min(wait_s, RETRY_AFTER_MS / 1e3))
                attempts.full.clear()
            else:
                await self._pool.wait(wait_s)

    async def _ask(
        self, replica: Replica, committed: Sequence[int], proposal: Proposal, traceparent: str
    ) -> tuple[Verdict, Cost]:
        opening = self._stream is None
        if self._stream is None:
            self._stream = _VerifyStream(replica.open_stream(self._remaining_s(), self._headers))
            self._replica = replica
            self._pool.opened(replica, committed, self._params.cache_salt)
        base_len, self._stream.num_sent_tokens = self._stream.num_sent_tokens, len(committed)
        request = verify_pb2.VerifyRequest(
            open=wire.open_sequence(self._params, self._prompt_len) if opening else None,
            base_len=base_len,
            token_ids=committed[base_len:],
            draft_token_ids=proposal.token_ids,
            parent_indices=proposal.parents,
            support_token_ids=[wire.ids_to_bytes(support.token_ids) for support in proposal.supports],
            traceparent=traceparent,
        )
        response, cost = await self._stream.exchange(request)
        return self._checked(response, proposal), replace(cost, load=wire.load_from_proto(response.load))

    def _checked(self, response: verify_pb2.VerifyResponse, proposal: Proposal) -> Verdict:
        """Raises:
        ServiceUnavailableError: the answer is invalid; another replica may give a valid one.
        """
        assert self._replica is not None
        assert self._replica.info is not None
        try:
            verdict = wire.verdict_from_proto(response)
            check_verdict(
                verdict,
                proposal,
                self._replica.info.vocab_size,
                matches_tokens=self._params.matches_tokens,
            )
        except (InternalError, InvalidRequestError) as error:
            raise ServiceUnavailableError(f"the service sent {error}") from None
        return verdict

    def close(self) -> None:
        """End the stream; a later round opens another one."""
        if self._stream is not None and self._replica is not None:
            self._stream.close()
            self._pool.closed(self._replica)
        self._stream = self._replica = None
