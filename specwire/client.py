"""The client SDK: `AsyncClient`, and `Client`, which runs one on a thread of its own. Torch-free."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from specwire import rpc, wire
from specwire.config import split_address
from specwire.core import (
    MAX_KEPT_BACK_TOKENS,
    MIN_CREDIT_TOKENS,
    Chunk,
    Completion,
    ModelInfo,
    SamplingParams,
    Token,
)
from specwire.credentials import TLS, Credentials
from specwire.errors import (
    ConfigError,
    InvalidRequestError,
    RequestCancelledError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
)
from specwire.v1 import generation_pb2, generation_pb2_grpc

DEFAULT_TIMEOUT_S = 120.0
Messages = Sequence[Mapping[str, str]]
Result = TypeVar("Result")


class AsyncStream:
    """A running generation: iterate over its chunks; leaving its `async with` cancels what is left.

    Whoever stops iterating pauses the generation, at most 64 tokens ahead (80 if `num_draft_tokens` is over
    48); asking for the next chunk resumes it, and says that the one before is consumed.
    """

    def __init__(self, call: Any, explain: Callable[[grpc.RpcError], SpecwireError]) -> None:
        self._call = call
        self._explain = explain
        self._num_in_hand = 0
        self._num_kept_back = 0
        self._tokens: list[Token] = []
        self._completion: Completion | None = None

    @property
    def completion(self) -> Completion:
        """The finished generation.

        Raises:
            SpecwireError: the stream is not at its end yet.
        """
        if self._completion is None:
            raise SpecwireError("the generation is not complete; iterate to its end first")
        return self._completion

    @property
    def tokens(self) -> list[Token]:
        """Tokens received so far."""
        return list(self._tokens)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk, until the generation is complete.

        Raises:
            SpecwireError: what ended the generation before it was complete.
        """
        if self._completion is not None:
            raise StopAsyncIteration
        self._num_kept_back += self._num_in_hand
        self._num_in_hand = 0
        response = await self._read()
        if response.WhichOneof("event") == "completion":
            self._completion = wire.completion_from_proto(response.completion, self._tokens)
            raise StopAsyncIteration
        chunk = wire.chunk_from_proto(response.chunk)
        self._tokens += chunk.tokens
        self._num_in_hand = len(chunk.tokens)
        return chunk

    async def _read(self) -> Any:
        try:
            await self._acknowledge()
            response = await self._call.read()
        except grpc.RpcError as error:
            raise self._explain(error) from None
        except asyncio.CancelledError:
            # Either the caller's own task is being cancelled, or the stream was, by `cancel` or `close`.
            if not self._call.cancelled() or _task_is_cancelled():
                raise
            raise RequestCancelledError("the generation was cancelled") from None
        if response is grpc.aio.EOF:
            num_tokens = len(self._tokens)
            raise ServiceUnavailableError(f"the stream ended after {num_tokens} tokens without a completion")
        return response

    async def _acknowledge(self) -> None:
        """Say what was consumed since the last time; not every chunk is worth a message."""
        if self._num_kept_back > MAX_KEPT_BACK_TOKENS:
            num_tokens, self._num_kept_back = self._num_kept_back, 0
            await rpc.send(self._call, wire.acknowledgement(num_tokens))

    def cancel(self) -> None:
        """End the generation on all services; harmless when it is complete."""
        self._call.cancel()


class AsyncClient:
    """Speaks to a coordinator from asyncio code.

    Args:
        address: `HOST:PORT` of the coordinator.
        timeout_s: deadline of a whole generation, in seconds, unless a call says otherwise.
        tls: speak TLS, with these files; None speaks plaintext.
        token: bearer token shown with every request.
        allow_plaintext: send the token without TLS beyond this machine.

    Raises:
        InvalidRequestError: on construction, naming the argument and its value.
        ConfigError: on construction, a file that cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: TLS | None = None,
        token: str = "",
        allow_plaintext: bool = False,
    ) -> None:
        _check_address(address)
        self._address = address
        self._timeout_s = _checked_timeout(timeout_s)
        credentials = Credentials(tls=tls, token=token, allow_plaintext=allow_plaintext)
        self._channel = rpc.open_channel(address, credentials=credentials)
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; running generations are cancelled."""
        await self._channel.close()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
        token: str = "",
        report_progress: bool = False,
    ) -> AsyncIterator[AsyncStream]:
        """Generate, chunk by chunk. Leaving the context cancels the generation on all services.

        Args:
            prompt: text; or give `prompt_token_ids`, or `messages` of `{"role": ..., "content": ...}`.
            params: how to continue it.
            timeout_s: deadline of the whole generation, in seconds.
            traceparent: W3C trace context of the caller, to be the parent of the generation's trace.
            token: bearer token of whoever this generation is for.
            report_progress: whether every chunk says what speculation did so far and where the time went.

        Raises:
            InvalidRequestError: names the parameter and its value.
            SpecwireError: see `specwire.errors`.
        """
        request = wire.generate_request(
            prompt,
            params or SamplingParams(),
            prompt_token_ids,
            [dict(m) for m in messages] if messages is not None else None,
            credit_tokens=MIN_CREDIT_TOKENS,
            report_progress=report_progress,
        )
        metadata = _metadata(traceparent, token)
        deadline_s = self._timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        call = self._stub.Generate(timeout=deadline_s, metadata=metadata)
        sending = asyncio.create_task(rpc.send(call, request))  # now, whenever the first chunk is asked for
        call.add_done_callback(lambda _: sending.cancel())
        stream = AsyncStream(call, self._explain)
        try:
            yield stream
        finally:
            stream.cancel()

    async def generate(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> Completion:
        """Generate, and wait for the end. Arguments and errors as for `stream`."""
        async with self.stream(
            prompt,
            params,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            timeout_s=timeout_s,
            traceparent=traceparent,
        ) as stream:
            async for _ in stream:
                pass
            return stream.completion

    async def get_model_info(
        self, *, timeout_s: float = 10.0, token: str = ""
    ) -> tuple[ModelInfo, ModelInfo | None]:
        """The target, and the draft while one is reachable; `token` as for `stream`."""
        request = generation_pb2.GetModelInfoRequest()
        response = await self._unary(self._stub.GetModelInfo, request, timeout_s, token)
        draft = wire.model_info_from_proto(response.draft) if response.HasField("draft") else None
        return wire.model_info_from_proto(response.target), draft

    async def get_status(self, *, timeout_s: float = 10.0) -> generation_pb2.GetStatusResponse:
        """What the coordinator is doing now."""
        request = generation_pb2.GetStatusRequest()
        status: generation_pb2.GetStatusResponse = await self._unary(self._stub.GetStatus, request, timeout_s)
        return status

    async def _unary(self, method: Any, request: Any, timeout_s: float, token: str = "") -> Any:
        metadata = _metadata("", token)
        try:
            return await method(request, timeout=_checked_timeout(timeout_s), metadata=metadata)
        except grpc.RpcError as error:
            raise self._explain(error) from None

    def _explain(self, error: grpc.RpcError) -> SpecwireError:
        """What gRPC reports by itself, in terms of the caller: which server, which argument."""
        ours = rpc.from_rpc_error(error)
        text = str(ours)
        if isinstance(ours, ServiceUnavailableError) and "failed to connect" in text:
            return ServiceUnavailableError(_why_not_connected(self._address, text))
        if isinstance(ours, ResourceExhaustedError) and "larger than max" in text:
            sizes = text.partition("(")[2].partition(")")[0]
            return InvalidRequestError("prompt", f"{sizes} bytes", "is over the server's message size limit")
        return ours


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

    def cancel(self) -> None:
        """End the generation on all services."""
        self._run(_call(self._stream.cancel))


class Client:
    """Speaks to a coordinator from ordinary code; may be shared between threads.

    Args:
        address: `HOST:PORT` of the coordinator.
        timeout_s: deadline of a whole generation, in seconds, unless a call says otherwise.
        tls, token, allow_plaintext: as for `AsyncClient`; errors too.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        tls: TLS | None = None,
        token: str = "",
        allow_plaintext: bool = False,
    ) -> None:
        _check_address(address)
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._calling = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="specwire-client", daemon=True)
        self._thread.start()
        options = {"tls": tls, "token": token, "allow_plaintext": allow_plaintext}
        try:
            self._client: AsyncClient = self._run(_call(AsyncClient, address, timeout_s=timeout_s, **options))
        except BaseException:
            self._end_thread()
            self._loop.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel and end the thread; running generations are cancelled."""
        with self._closing:
            if self._closed:
                return
            self._run(self._end())
            with self._calling:  # calls that came before are on the loop, and none comes after
                self._closed = True
            self._end_thread()
            self._cancel_late_calls()
            self._loop.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _cancel_late_calls(self) -> None:
        """End what other threads asked for while the loop was ending: they would wait for ever."""
        self._loop.run_until_complete(asyncio.sleep(0))  # their calls become tasks
        late = asyncio.all_tasks(self._loop)
        for task in late:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait_for(_all_ended(late), timeout=1.0))

    @contextlib.contextmanager
    def stream(
        self, prompt: str | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Stream]:
        """Generate, chunk by chunk; options and errors as for `AsyncClient.stream`."""
        context = self._client.stream(prompt, params, **options)
        stream = self._run(context.__aenter__())
        try:
            yield Stream(stream, self._run)
        finally:
            # At the interpreter's end no thread is left to do so, and closing has cancelled it already.
            if not sys.is_finalizing():
                with contextlib.suppress(SpecwireError):
                    self._run(context.__aexit__(None, None, None))

    def generate(
        self, prompt: str | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Generate, and wait for the end; options and errors as for `AsyncClient.generate`."""
        return self._run(self._client.generate(prompt, params, **options))

    def get_model_info(self, *, timeout_s: float = 10.0) -> tuple[ModelInfo, ModelInfo | None]:
        """The target, and the draft while one is reachable."""
        return self._run(self._client.get_model_info(timeout_s=timeout_s))

    def get_status(self, *, timeout_s: float = 10.0) -> generation_pb2.GetStatusResponse:
        """What the coordinator is doing now."""
        return self._run(self._client.get_status(timeout_s=timeout_s))

    async def _end(self) -> None:
        """Close the channel, and let other threads' calls see the end of theirs before the loop stops."""
        await self._client.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        if running:
            await asyncio.wait(running, timeout=1.0)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        with self._calling:
            if self._closed:
                work.close()
                raise SpecwireError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RequestCancelledError("the client was closed") from None
        except BaseException:
            future.cancel()
            raise


async def _all_ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


async def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a plain function on the loop's thread."""
    return function(*args, **kwargs)


def _why_not_connected(address: str, text: str) -> str:
    """gRPC's words for a failed connection, down to what the caller can do something about."""
    why = text.partition("last error: ")[2].removesuffix(": OK")
    if "handshake failed" in why or "Verification" in why:
        return f"no TLS connection to {address} ({why.rpartition(': ')[2]})"
    if why.endswith("Socket closed"):
        return f"{address} closes the connection; it may expect TLS, or a certificate of this client"
    return f"nothing serves at {address} ({why.rpartition(': ')[2]})"


def _metadata(traceparent: str, token: str) -> list[tuple[str, str]]:
    metadata = [("traceparent", traceparent)] if traceparent else []
    return [*metadata, ("authorization", f"Bearer {token}")] if token else metadata


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_address(address: str) -> None:
    try:
        split_address("address", address)
    except ConfigError:
        raise InvalidRequestError("address", address, "is not HOST:PORT") from None


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise InvalidRequestError("timeout_s", timeout_s, "must be a finite number over 0")
    return timeout_s
