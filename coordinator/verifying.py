"""The verify service of one sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.generation import Cost
from coordinator.mirror import Mirror
from coordinator.peers import VerifyPeer
from coordinator.streams import Call, attributes, cost_of
from specwire import clock, tracing, wire
from specwire.core import Proposal, SamplingParams, Verdict
from specwire.errors import InternalError, PrefixMismatchError, ServiceUnavailableError
from specwire.v1 import verify_pb2

log = logging.getLogger(__name__)


class _VerifyStream:
    """A request, its answer, the next request."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._num_requests = 0
        self.mirror = Mirror()

    async def exchange(self, request: verify_pb2.VerifyRequest) -> tuple[verify_pb2.VerifyResponse, Cost]:
        """Send one request and wait for its answer; late answers to earlier requests are dropped.

        Raises:
            SpecwireError: what the peer raised, or what the transport's failure stands for.
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
    """The verify service. A stream that breaks is opened again once, from the committed tokens."""

    def __init__(
        self,
        peer: VerifyPeer,
        params: SamplingParams,
        prompt_len: int,
        *,
        remaining_s: Callable[[], float | None],
        tracer: tracing.Tracing,
    ) -> None:
        self._peer = peer
        self._params = params
        self._prompt_len = prompt_len
        self._remaining_s = remaining_s
        self._tracer = tracer
        self._stream: _VerifyStream | None = None

    async def verify(self, committed: Sequence[int], proposal: Proposal, parent: str) -> tuple[Verdict, Cost]:
        """See `generation.Verifier`.

        Raises:
            SpecwireError: the target is gone, or refused the request.
        """
        with self._tracer.span("verify", parent=parent) as span:
            try:
                verdict, cost = await self._ask(committed, proposal, span.traceparent)
            except (PrefixMismatchError, ServiceUnavailableError) as error:
                log.warning("opening the verify stream again: %s", error)
                self.close()
                await self._peer.reconnect()
                verdict, cost = await self._ask(committed, proposal, span.traceparent)
            span.set(attributes(proposal, cost))
        return verdict, cost

    async def _ask(
        self, committed: Sequence[int], proposal: Proposal, traceparent: str
    ) -> tuple[Verdict, Cost]:
        opening = self._stream is None
        if self._stream is None:
            self._stream = _VerifyStream(self._peer.open_stream(self._remaining_s()))
        base_len, token_ids = self._stream.mirror.advance(committed, proposal.token_ids)
        request = verify_pb2.VerifyRequest(
            open=wire.open_sequence(self._params, self._prompt_len) if opening else None,
            base_len=base_len,
            token_ids=token_ids,
            draft_token_ids=proposal.token_ids,
            support_token_ids=[wire.ids_to_bytes(support.token_ids) for support in proposal.supports],
            traceparent=traceparent,
        )
        response, cost = await self._stream.exchange(request)
        if response.base_len != len(committed):
            raise InternalError(f"verify answered for base_len={response.base_len}, not {len(committed)}")
        return wire.verdict_from_proto(response), replace(cost, load=wire.load_from_proto(response.load))

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
