"""Draft and verify as seen from the coordinator: one gRPC stream for each sequence and service."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from coordinator.generation import Cost
from coordinator.peers import DraftPeer, VerifyPeer
from specwire import rpc, tracing, wire
from specwire.core import Proposal, SamplingParams, Verdict
from specwire.errors import (
    DeadlineExceededError,
    InternalError,
    PrefixMismatchError,
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.v1 import draft_pb2, verify_pb2

log = logging.getLogger(__name__)

_RETRY_AFTER_MS = 1000


class SequenceStream:
    """A bidirectional stream, and the tokens that its peer holds.

    held       ├── committed before ──┤├─ draft tokens ─┤
    committed  ├── committed before ──┤├ accepted ┤ x        x: recovered or bonus
                                                 ▲ base_len: everything before is held already
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._held: list[int] = []
        self._agreed_len = 0
        self._num_requests = 0

    def advance(self, committed: Sequence[int], draft: Sequence[int] = ()) -> tuple[int, list[int]]:
        """Note that the peer will hold `committed` and then `draft`; returns what it must be told.

        Returns:
            `base_len`, up to which the peer holds the right tokens, and the committed ones after it.
        """
        base_len, held = self._agreed_len, self._held
        end = min(len(held), len(committed))
        while base_len < end and held[base_len] == committed[base_len]:
            base_len += 1
        del held[base_len:]
        held.extend(committed[base_len:])
        self._agreed_len = len(held)
        held.extend(draft)
        return base_len, list(committed[base_len:])

    def extend(self, draft: Sequence[int]) -> None:
        """Note draft tokens that the peer added by itself."""
        self._held.extend(draft)

    async def exchange(self, request: Any) -> tuple[Any, Cost]:
        """Send one request and wait for its answer; late answers to earlier requests are dropped.

        Raises:
            SpecwireError: what the peer raised, or what the transport's failure stands for.
        """
        self._num_requests += 1
        request.request_id = self._num_requests
        started_ns = time.perf_counter_ns()
        try:
            await rpc.send(self._call, request)
            response = await self._call.read()
            while response is not grpc.aio.EOF and response.request_id != self._num_requests:
                response = await self._call.read()
        except grpc.RpcError as error:
            raise _peer_error(error) from None
        except asyncio.InvalidStateError:
            raise await self._failure() from None
        if response is grpc.aio.EOF:
            raise await self._failure()
        cost = Cost(
            queue_ns=response.timings.queue_ns,
            forward_ns=response.timings.forward_ns,
            wall_ns=time.perf_counter_ns() - started_ns,
            request_bytes=request.ByteSize(),
            response_bytes=response.ByteSize(),
            num_cached_tokens=response.num_cached_tokens,
            num_told_tokens=len(request.token_ids),
        )
        return response, cost

    def close(self) -> None:
        """Cancel the stream; the peer frees its memory."""
        self._call.cancel()

    async def _failure(self) -> SpecwireError:
        """Why the stream ended."""
        if await self._call.code() is grpc.StatusCode.OK:
            return ServiceUnavailableError("the service ended the stream")
        try:
            await self._call.read()  # of an ended call: raises its status
        except grpc.RpcError as error:
            return _peer_error(error)
        except asyncio.CancelledError:
            pass
        return ServiceUnavailableError("the stream was cancelled")


def _peer_error(error: grpc.RpcError) -> SpecwireError:
    """Why a peer's stream failed; a cancel that is not ours is a service that shuts down."""
    ours = rpc.from_rpc_error(error)
    return ServiceUnavailableError(str(ours)) if isinstance(ours, RequestCancelledError) else ours


class RemoteDrafter:
    """The draft service, which may fail: then proposals are empty, and `unavailable` says why."""

    def __init__(
        self,
        peer: DraftPeer,
        params: SamplingParams,
        prompt_len: int,
        *,
        vocab_limit: int,
        timeout_s: float,
        deadline_s: float | None,
        tracer: tracing.Tracing,
    ) -> None:
        self._peer = peer
        self._open = wire.open_sequence(params, prompt_len, vocab_limit)
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._tracer = tracer
        self._stream: SequenceStream | None = None
        self._retry_at_s = 0.0
        self.unavailable = ""

    async def propose(
        self, committed: Sequence[int], num_draft_tokens: int, parent: str
    ) -> tuple[Proposal, Cost]:
        """See `generation.Drafter`."""
        num_draft_tokens = min(num_draft_tokens, self._peer.room(len(committed)))
        nothing = Proposal(len(committed)), Cost()
        if num_draft_tokens <= 0 or time.monotonic() < self._retry_at_s:
            return nothing
        if not self._peer.available:
            self.unavailable = self.unavailable or self._peer.unavailable
            return nothing
        with self._tracer.span("draft", parent=parent) as span:
            try:
                async with asyncio.timeout(self._timeout_s):
                    proposal, cost = await self._ask(committed, num_draft_tokens, span.traceparent)
            except (SpecwireError, TimeoutError) as error:
                self._lose(error)
                return nothing
            span.set(_attributes(proposal, cost))
        return proposal, cost

    async def _ask(self, committed: Sequence[int], wanted: int, traceparent: str) -> tuple[Proposal, Cost]:
        opening = self._stream is None
        if self._stream is None:
            self._stream = SequenceStream(self._peer.stub.Draft(timeout=self._deadline_s))
        base_len, token_ids = self._stream.advance(committed)
        request = draft_pb2.DraftRequest(
            open=self._open if opening else None,
            base_len=base_len,
            token_ids=token_ids,
            num_draft_tokens=wanted,
            traceparent=traceparent,
        )
        response, cost = await self._stream.exchange(request)
        if response.base_len != len(committed) or not response.proposals:
            raise InternalError(f"the draft answered for base_len={response.base_len}, not {len(committed)}")
        proposal = wire.proposal_from_proto(response.proposals[0], response.base_len)
        self._stream.extend(proposal.token_ids)
        return proposal, cost

    def _lose(self, error: Exception) -> None:
        """Decode plainly until the draft answers again; a stale prefix just re-opens the stream."""
        self.close()
        if isinstance(error, PrefixMismatchError):
            return
        if isinstance(error, ResourceExhaustedError):  # full, not lost: others may go on with it
            self.unavailable = str(error)
            self._retry_at_s = time.monotonic() + (error.retry_after_ms or _RETRY_AFTER_MS) / 1e3
            return
        hung = isinstance(error, TimeoutError) and not isinstance(error, DeadlineExceededError)
        self.unavailable = f"no proposal within {self._timeout_s * 1e3:.0f} ms" if hung else str(error)
        if hung or isinstance(error, ServiceUnavailableError | InternalError):
            self._peer.lost(self.unavailable)
        else:  # our own deadline, or a request it refuses: nothing that others would suffer from
            self._retry_at_s = math.inf

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


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
        self._stream: SequenceStream | None = None

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
            span.set(_attributes(proposal, cost))
        return verdict, cost

    async def _ask(
        self, committed: Sequence[int], proposal: Proposal, traceparent: str
    ) -> tuple[Verdict, Cost]:
        opening = self._stream is None
        if self._stream is None:
            self._stream = SequenceStream(self._peer.stub.Verify(timeout=self._remaining_s()))
        base_len, token_ids = self._stream.advance(committed, proposal.token_ids)
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


def _attributes(proposal: Proposal, cost: Cost) -> dict[str, int]:
    return {
        tracing.BASE_LEN: proposal.base_len,
        tracing.NUM_DRAFT_TOKENS: len(proposal.token_ids),
        tracing.REQUEST_BYTES: cost.request_bytes,
        tracing.RESPONSE_BYTES: cost.response_bytes,
        tracing.NUM_CACHED_TOKENS: cost.num_cached_tokens,
    }
