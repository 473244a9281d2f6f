"""A running generation on the client's side: over one gRPC stream, or over several where some are lost."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import grpc
import grpc.aio

from specwire.client.endpoints import Endpoint, Endpoints
from specwire.client.resume import NotServedError, ReceivedTokens, RetryPolicy, Search
from specwire.client.spans import GenerationSpan
from specwire.completion import Chunk, Completion, Token
from specwire.core import MAX_UNACKNOWLEDGED_TOKENS
from specwire.errors import (
    InternalError,
    RequestCancelledError,
    ServiceUnavailableError,
    SpecwireError,
    StreamIdleError,
)
from specwire.rpc import private, statuses
from specwire.rpc.wire.client import acknowledgement, completion_from_proto
from specwire.v1 import generation_pb2

Metadata = Sequence[tuple[str, str]]
_MAX_ACKNOWLEDGE_DELAY_S = 1.0
"""A slow client acknowledges at least this often, well within the coordinator's idle timeout."""


class Part:
    """The part of a generation that one coordinator serves: one gRPC stream, with its acknowledgements."""

    def __init__(
        self,
        endpoint: Endpoint,
        request: generation_pb2.GenerateRequest,
        timeout_s: float,
        metadata: Metadata | None,
    ) -> None:
        self._endpoint, self._stub = endpoint, endpoint.stub
        self._call = self._stub.Generate(timeout=timeout_s, metadata=metadata)
        self._is_connected = self._has_answered = False
        self._num_in_hand = 0
        self._num_unacknowledged = 0
        self._acknowledged_s = asyncio.get_running_loop().time()
        sending = asyncio.create_task(self._begin(request))  # now, rather than with the first read
        self._call.add_done_callback(lambda _: sending.cancel())

    async def _begin(self, request: generation_pb2.GenerateRequest) -> None:
        with contextlib.suppress(grpc.RpcError):
            await self._call.wait_for_connection()
            self._is_connected = self._endpoint.was_reached = True
        await private.send(self._call, request)

    def has_begun(self, refusal: NotServedError) -> bool:
        """Whether the generation ran here before this failure, rather than being refused."""
        return self._has_answered or (self._is_connected and refusal.may_recover)

    async def connect(self, timeout_s: float) -> None:
        """Wait for the connection; errors as for `read`."""
        connecting = asyncio.ensure_future(self._call.wait_for_connection())
        # gRPC would go on waiting for the connection of a call that is cancelled before it has begun.
        self._call.add_done_callback(lambda call: call.cancelled() and connecting.cancel())
        try:
            with self._translated():
                async with asyncio.timeout(timeout_s):
                    await connecting
        except TimeoutError:  # ours, or the call's, whose deadline is no earlier
            self.cancel()
            why = f"nothing serves at {self._endpoint.address} (no connection in time)"
            raise NotServedError(ServiceUnavailableError(why), may_recover=True) from None

    async def read(self) -> generation_pb2.GenerateResponse:
        """The next message; the tokens of the one before count as consumed.

        Raises:
            NotServedError: this coordinator fails it; another one may not.
            SpecwireError: it fails everywhere.
        """
        with self._translated():
            await self._acknowledge()
            response = await self._call.read()
        if response is grpc.aio.EOF:
            error = ServiceUnavailableError("the stream ended without a completion")
            raise NotServedError(error, may_recover=True)
        if response is None:
            raise InternalError(f"the coordinator at {self._endpoint.address}: {statuses.GARBLED}")
        self._has_answered = True
        self._num_in_hand = len(response.chunk.tokens)
        answer: generation_pb2.GenerateResponse = response
        return answer

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._endpoint.problem(error, self._stub) from None
        except asyncio.CancelledError:
            # Either the caller's own task is cancelled, or the stream, by `cancel` or `close`.
            task = asyncio.current_task()
            if not self._call.cancelled() or (task is not None and task.cancelling()):
                raise
            raise RequestCancelledError("the generation was cancelled") from None

    async def _acknowledge(self) -> None:
        """Acknowledge consumed tokens, if they are many or old enough to be worth a message."""
        self._num_unacknowledged += self._num_in_hand
        self._num_in_hand = 0
        now_s = asyncio.get_running_loop().time()
        is_long_ago = self._num_unacknowledged > 0 and now_s - self._acknowledged_s > _MAX_ACKNOWLEDGE_DELAY_S
        if is_long_ago or self._num_unacknowledged > MAX_UNACKNOWLEDGED_TOKENS:
            self._acknowledged_s = now_s
            num_tokens, self._num_unacknowledged = self._num_unacknowledged, 0
            await private.send(self._call, acknowledgement(num_tokens))

    def cancel(self) -> None:
        """Cancel the stream; no effect if it has ended."""
        self._call.cancel()


class AsyncStream:
    """A running generation: iterate over its chunks; leaving its `async with` cancels what is left.

    A client that stops iterating pauses the generation, at most 64 tokens ahead (80 if `num_draft_tokens` is
    over 48); reading the next chunk continues it, and acknowledges the previous one.

    When its coordinator is lost, another one serves the next chunk, as the client's `RetryPolicy` says. A
    pause longer than the coordinator's `--idle-timeout-s` ends the stream there; reading the next chunk then
    resumes it, at the same coordinator if that still serves.

    Attributes:
        num_resumes: how often it was resumed so far, at another coordinator or the same one.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        request: generation_pb2.GenerateRequest,
        retry: RetryPolicy,
        timeout_s: float,
        metadata: Metadata | None,
        span: GenerationSpan,
    ) -> None:
        self._endpoints = endpoints
        self._span = span
        self._retry = retry
        self._ends_s = asyncio.get_running_loop().time() + timeout_s
        self._metadata = metadata
        self._progress = ReceivedTokens(request)
        self.num_resumes = 0
        self._num_futile = 0  # losses in a row without a further token
        self._num_tokens_before = 0
        self._cancelled = asyncio.Event()
        self._completion: Completion | None = None
        self._reading = asyncio.Lock()  # of several readers, one would see the end as a loss
        self._wrong: InternalError | None = None  # what came is no generation, nor is anything after it
        self._open(endpoints.preferred)

    @property
    def completion(self) -> Completion:
        """The finished generation; raises SpecwireError while it is not complete."""
        if self._completion is None:
            raise SpecwireError("the generation is not complete; iterate to its end first")
        return self._completion

    @property
    def tokens(self) -> list[Token]:
        """Tokens received so far."""
        return list(self._progress.tokens)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk, until the generation is complete.

        Raises:
            GenerationLostError: its coordinator was lost, and no other one resumed it; has the tokens so far.
            GenerationIdleError: it was paused for too long, and not resumed; has the tokens so far.
            SpecwireError: any other failure of the generation.
        """
        try:
            async with self._reading:
                if self._wrong is not None:
                    raise self._wrong
                chunk = await self._next_chunk()
        except InternalError as error:
            self._wrong = error
            self._part.cancel()
            self._span.failed(error)
            raise
        except BaseException as error:
            self._span.failed(error)
            raise
        if chunk is None:
            raise StopAsyncIteration
        self._span.received(chunk)
        return chunk

    async def _next_chunk(self) -> Chunk | None:
        while self._completion is None:
            try:
                response = await self._part.read()
            except NotServedError as refusal:
                response = await self._read_elsewhere(refusal)
            if response.WhichOneof("event") == "completion":
                self._progress.check_end(response.completion)
                tokens, num_resumes = self._progress.tokens, self.num_resumes
                done = completion_from_proto(response.completion, tokens, num_resumes)
                self._completion = replace(done, prompt=tuple(self._progress.prompt))
                self._span.completed(self._completion)
                break
            chunk = self._progress.take(response)
            if chunk.tokens or chunk.rejected or chunk.prompt:  # else all of its tokens are held back
                return chunk
        return None

    async def _read_elsewhere(self, refusal: NotServedError) -> generation_pb2.GenerateResponse:
        """The next message, from the coordinator that takes over; raises SpecwireError if none does."""
        has_run, search = self._start_search(refusal)
        while (turn := search.next(self._now_s)) is not None:
            index, pause_s = turn
            await self._pause(pause_s)
            self._span.moved(self._endpoints[index].address, search.error)
            try:
                self._open(index)
                until_s = search.until_s if has_run else self._ends_s
                await self._part.connect(max(0.0, until_s - self._now_s))
                response = await self._part.read()
            except NotServedError as another:
                if not has_run and self._part.has_begun(another):
                    has_run, search = self._start_search(another)
                else:
                    search.refused(index, another)
            else:
                self._endpoints.preferred = index
                self.num_resumes += has_run
                return response
        raise (self._progress.lost(search.error) if has_run else search.error) from None

    def _start_search(self, refusal: NotServedError) -> tuple[bool, Search]:
        """Whether the generation has run, and where to look for a coordinator.

        For one that never ran each other address is asked once; one that ran is worth waiting for, or may not
        be resumed, which raises GenerationLostError or GenerationIdleError.
        """
        until_s = min(self._now_s + self._retry.patience_s, self._ends_s)
        if has_run := self._part.has_begun(refusal):
            was_idle = isinstance(refusal.error, StreamIdleError)
            if len(self._progress.tokens) > self._num_tokens_before:
                self._num_futile, self._num_tokens_before = 0, len(self._progress.tokens)
            may_resume = was_idle or self._num_futile < self._retry.max_resumes
            if not (self._retry.resume and may_resume):
                raise self._progress.lost(refusal.error) from None
            self._num_futile += not was_idle
        else:
            was_there = refusal.may_recover and self._endpoints[self._index].was_reached
            until_s = until_s if refusal.is_draining or was_there else -math.inf
        full_s = self._ends_s if self._retry.wait_when_full else until_s
        return has_run, Search(
            self._retry, len(self._endpoints), self._index, refusal, until_s=until_s, full_until_s=full_s
        )

    def _open(self, index: int) -> None:
        self._index = index
        left_s = max(0.0, self._ends_s - self._now_s)
        self._part = Part(self._endpoints[index], self._progress.request(), left_s, self._metadata)

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def _pause(self, pause_s: float) -> None:
        """Wait before the next attempt; raises RequestCancelledError if the generation is cancelled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._cancelled.wait()
        if self._cancelled.is_set():
            raise RequestCancelledError("the generation was cancelled")

    def cancel(self) -> None:
        """Cancel the generation on all services; no effect if it is complete."""
        self._cancelled.set()
        self._part.cancel()


class Stream:
    """A running generation: iterate over its chunks; leaving its `with` cancels what is left."""

    def __init__(self, stream: AsyncStream, run: Any) -> None:
        self._stream = stream
        self._run = run

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks until the generation is complete; errors as for `AsyncStream`."""
        while (chunk := self._run(self._next())) is not None:
            yield chunk

    async def _next(self) -> Chunk | None:
        return await anext(self._stream, None)

    @property
    def completion(self) -> Completion:
        """The finished generation; see `AsyncStream.completion`."""
        return self._stream.completion

    @property
    def tokens(self) -> list[Token]:
        """Tokens received so far."""
        return self._stream.tokens

    @property
    def num_resumes(self) -> int:
        """See `AsyncStream.num_resumes`."""
        return self._stream.num_resumes

    def cancel(self) -> None:
        """Cancel the generation on all services."""
        self._run(self._cancel())

    async def _cancel(self) -> None:
        self._stream.cancel()
