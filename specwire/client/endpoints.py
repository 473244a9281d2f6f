"""The coordinators that a client knows, each behind a connection of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from specwire.client.resume import NotServedError, RetryPolicy, Search, may_serve_elsewhere
from specwire.config.security.tls import Credentials
from specwire.errors import (
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
    StreamIdleError,
)
from specwire.rpc import channel, statuses
from specwire.rpc.connecting import CLIENT, explain
from specwire.v1 import generation_pb2_grpc


class Endpoint:
    """An address, behind which one coordinator or several serve.

    Attributes:
        address: its `HOST:PORT`.
        stub: of the GenerationService there.
        was_reached: whether a connection to it was ever made.
    """

    was_reached = False

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address = address
        self._credentials = credentials
        self._left = channel.LeftChannels()
        self._connect()

    def _connect(self) -> None:
        self._channel = channel.open_channel(
            self.address, credentials=self._credentials, keepalive=channel.TOWARDS_CLIENTS, is_shared=False
        )
        self.stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def problem(self, error: grpc.RpcError, stub: Any) -> NotServedError | SpecwireError:
        """The error of a failed call of this stub, in terms of the caller: which server, which argument.

        It is a `NotServedError` where another address may serve the call. Where the coordinator shuts down,
        later calls go over another connection, which a balancer leads to one that serves; calls that run
        there go on.
        """
        ours = statuses.from_rpc_error(error)
        text = str(ours)
        if isinstance(ours, ServiceUnavailableError):
            why = explain(text, self.address, CLIENT)
            ours = ServiceUnavailableError(why) if why else ours
        elif isinstance(ours, ResourceExhaustedError) and "larger than max" in text:
            if "CLIENT:" in text:
                return InternalError(f"the coordinator at {self.address} sent too large a message: {text}")
            sizes = text.partition("(")[2].partition(")")[0]
            return InvalidRequestError("prompt", f"{sizes} bytes", "is over the server's message size limit")
        if not may_serve_elsewhere(ours):
            return ours
        is_lost = isinstance(ours, RequestCancelledError | StreamIdleError) or not statuses.was_reported(
            error
        )
        may_recover = is_lost and not isinstance(ours, ResourceExhaustedError)
        refusal = NotServedError(ours, may_recover=may_recover)
        if refusal.is_draining and stub is self.stub:
            self._left.add(self._channel)
            self._connect()
        return refusal

    async def close(self) -> None:
        """Close the channels and cancel their calls."""
        await self._left.close()
        await self._channel.close()


class Endpoints:
    """All coordinators, in the order of their addresses; the preferred one served last, and is tried
    first."""

    def __init__(self, endpoints: Sequence[Endpoint], retry: RetryPolicy) -> None:
        self._endpoints = endpoints
        self._retry = retry
        self._is_closed = False
        self.preferred = 0

    def __len__(self) -> int:
        return len(self._endpoints)

    def __getitem__(self, index: int) -> Endpoint:
        """Raises RequestCancelledError once they are closed."""
        if self._is_closed:
            raise RequestCancelledError("the client is closed")
        return self._endpoints[index]

    async def unary(
        self, method: str, request: Any, timeout_s: float, metadata: Sequence[tuple[str, str]] = ()
    ) -> Any:
        """The response of the first that serves the call, within a timeout for all of them. Where one of them
        shuts down, another one may take its place: they are asked again, within the patience."""
        now_s = asyncio.get_running_loop().time
        ends_s, patient_until_s = now_s() + timeout_s, now_s() + min(timeout_s, self._retry.patience_s)
        index, pause_s = self.preferred, 0.0
        search: Search | None = None
        while True:
            await asyncio.sleep(pause_s)
            stub = self[index].stub
            try:
                answer = await getattr(stub, method)(request, timeout=ends_s - now_s(), metadata=metadata)
            except grpc.RpcError as error:
                problem = self[index].problem(error, stub)
            except asyncio.CancelledError:
                # Either the caller's own task is cancelled, or the call, by `close`.
                task = asyncio.current_task()
                if not self._is_closed or (task is not None and task.cancelling()):
                    raise
                raise RequestCancelledError("the client is closed") from None
            else:
                if answer is None:
                    raise InternalError(f"the coordinator at {self[index].address}: {statuses.GARBLED}")
                self.preferred = index
                return answer
            if not isinstance(problem, NotServedError):
                raise problem
            if search is None:
                until_s = patient_until_s if problem.is_draining else -math.inf
                search = Search(
                    self._retry, len(self), index, problem, until_s=until_s, full_until_s=-math.inf
                )
            search.refused(index, problem)
            turn = search.next(now_s())
            if turn is None or now_s() >= ends_s:
                raise search.error
            index, pause_s = turn

    async def close(self) -> None:
        self._is_closed = True
        for endpoint in self._endpoints:
            await endpoint.close()
