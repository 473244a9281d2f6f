"""What draft and verify share as peers: gRPC streams, their errors, costs and spans of requests."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from coordinator.cost import CallOutcome, Cost
from specwire.core import Proposal
from specwire.errors import (
    RequestCancelledError,
    ServiceUnavailableError,
    SpecwireError,
    UnauthenticatedError,
)
from specwire.rpc import private, statuses
from specwire.rpc.connecting import PEER, explain
from specwire.telemetry import semantics as names
from specwire.telemetry.tracing import Span, SpanKind, Tracing


def peer_error(error: grpc.RpcError) -> SpecwireError:
    """Why a peer's stream failed; a cancellation that is not ours means that the service shuts down.

    A token that a peer refuses is this process's own: no client is at fault.
    """
    ours = statuses.from_rpc_error(error)
    text = str(ours)
    if isinstance(ours, ServiceUnavailableError) and (why := explain(text, "this address", PEER)):
        return ServiceUnavailableError(why)
    if isinstance(ours, UnauthenticatedError):
        return ServiceUnavailableError(f"{text}; --peer-token-file holds the one that is sent")
    return ServiceUnavailableError(text) if isinstance(ours, RequestCancelledError) else ours


async def why_ended(call: Any) -> SpecwireError:
    """Why a stream has ended, from its status."""
    if await call.code() is grpc.StatusCode.OK:
        return ServiceUnavailableError("the service ended the stream")
    try:
        await call.read()  # raises the status of an ended call
    except grpc.RpcError as error:
        return peer_error(error)
    except asyncio.CancelledError:
        pass
    return ServiceUnavailableError("the stream was cancelled")


class GrpcCall:
    """A `link.Call` over gRPC."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, request: Any) -> None:
        await private.send(self._call, request)

    async def read(self) -> Any:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise peer_error(error) from None
        except asyncio.InvalidStateError:
            raise await why_ended(self._call) from None
        if response is grpc.aio.EOF:
            raise await why_ended(self._call)
        if response is None:  # what grpc.aio makes of bytes that are no message
            raise ServiceUnavailableError(statuses.GARBLED)
        return response

    def cancel(self) -> None:
        self._call.cancel()


def span_around(tracer: Tracing, role: str, address: str, parent: Span) -> Span:
    """A span around one call to a model service."""
    attributes = names.server(address) if tracer.enabled else None
    return tracer.span(role, kind=SpanKind.CLIENT, parent=parent.context, attributes=attributes)


def describe(span: Span, proposal: Proposal, cost: Cost) -> None:
    """Say on the span around a call what it was about, and where its time went."""
    if span.trace_id:
        span.set(
            {
                names.BASE_LEN: proposal.base_len,
                names.NUM_DRAFT_TOKENS: len(proposal.token_ids),
                names.CALL_OUTCOME: cost.outcome,
                names.REQUEST_BYTES: cost.request_bytes,
                names.RESPONSE_BYTES: cost.response_bytes,
                names.NUM_CACHED_TOKENS: cost.num_cached_tokens,
                names.QUEUE_MS: cost.queue_ns / 1e6,
                names.FORWARD_MS: cost.forward_ns / 1e6,
                names.HANDLING_MS: cost.handling_ns / 1e6,
                names.NETWORK_MS: cost.network_ns / 1e6,
                # Else the service's span may end after this one.
                names.AWAITED: cost.outcome not in (CallOutcome.TIMED_OUT, CallOutcome.BEGUN),
            }
        )
