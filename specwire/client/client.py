"""The client SDK: `AsyncClient`, and `Client`, which runs one on a thread of its own. Torch-free.

Their streams are in `streaming.py`; how they resume after the loss of a coordinator is in `resume.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from specwire.client import arguments
from specwire.client.arguments import Messages, Prompt
from specwire.client.endpoints import Endpoint, Endpoints
from specwire.client.resume import RetryPolicy
from specwire.client.spans import GenerationSpan
from specwire.client.streaming import AsyncStream, Stream
from specwire.completion import Completion
from specwire.config.security.tls import TLS, Credentials
from specwire.core import MIN_CREDIT_TOKENS, ModelInfo, SamplingParams
from specwire.errors import InternalError, RequestCancelledError, SpecwireError
from specwire.rpc.wire.client import generate_request
from specwire.rpc.wire.model import model_info_from_proto
from specwire.rpc.wire.tokenizer_files import TokenizerFiles, fetch
from specwire.telemetry import tracing
from specwire.telemetry.propagation import TraceContext
from specwire.telemetry.tracing import Tracing
from specwire.v1 import generation_pb2

DEFAULT_TIMEOUT_S = 120.0
DEFAULT_RETRY = RetryPolicy()
DEFAULT_MAX_CONCURRENT = 256
"""What a coordinator runs at a time by default."""
Result = TypeVar("Result")


class AsyncClient:
    """A client of a coordinator, for asyncio code.

    Args:
        address: `HOST:PORT` of the coordinator; or of several that serve the same models, as a sequence or
            separated by commas. The one that served last is tried first, initially the first. All addresses
            of `dns:///NAME:PORT` take requests in turn.
        timeout_s: deadline of a whole generation, in seconds, unless a call says otherwise.
        retry: what to do when a coordinator is lost, or refuses a request.
        tls: TLS settings; None for plaintext.
        token: bearer token, sent with every request.
        allow_plaintext: send the token without TLS beyond this machine.
        tracer: where spans go; None for the application's own OpenTelemetry tracing, if it has one.

    Raises:
        InvalidRequestError: on construction, naming the argument and its value.
        ConfigError: on construction, an invalid file.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: TLS | None = None,
        token: str = "",
        allow_plaintext: bool = False,
        tracer: Tracing | None = None,
    ) -> None:
        self._addresses = arguments.addresses(address)
        self._timeout_s = arguments.timeout(timeout_s)
        self._retry = retry
        self._credentials = Credentials(tls=tls, token=token, allow_plaintext=allow_plaintext)
        self._tracer = tracer
        self._endpoints = Endpoints([Endpoint(each, self._credentials) for each in self._addresses], retry)
        self._streams: set[AsyncStream] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channels; running generations are cancelled."""
        for stream in self._streams:
            stream.cancel()
        await self._endpoints.close()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        traceparent: str | TraceContext = "",
        token: str = "",
        request_id: str = "",
        report_progress: bool = False,
    ) -> AsyncIterator[AsyncStream]:
        """Generate, chunk by chunk. Leaving the context cancels the generation on all services.

        Args:
            prompt: text; or give `prompt_token_ids`, or `messages` of `{"role": ..., "content": ...}`, with
                further fields where the chat template reads them, such as `tool_calls`.
            tools: functions that the model may call, as OpenAI's API has them; its chat template describes
                them, and calls are part of the text.
            chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
            params: how to continue it.
            timeout_s: deadline of the whole generation, in seconds.
            traceparent: W3C trace context of the caller, to be the parent of the generation's trace; may come
                with its tracestate and baggage. Without one, the application's current OpenTelemetry span.
            token: bearer token of the user that this generation is for.
            request_id: the caller's name of the request, of at most 128 letters, digits and `._:/-`; sent as
                `x-request-id`.
            report_progress: whether every chunk reports the round's draft tokens, and speculation and timing
                so far; then each round is a chunk of its own.

        Raises:
            InvalidRequestError: names the parameter and its value.
            SpecwireError: see `specwire.errors`.
        """
        arguments.prompt(prompt)
        request = generate_request(
            prompt,
            arguments.params(params),
            prompt_token_ids,
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            credit_tokens=MIN_CREDIT_TOKENS,
            report_progress=report_progress,
        )
        authorization = self._authorization(token)
        deadline_s = self._timeout_s if timeout_s is None else arguments.timeout(timeout_s)
        tracer = self._tracer or tracing.of_application()
        address = self._endpoints[self._endpoints.preferred].address
        span = GenerationSpan(
            tracer, request, address, arguments.parent(traceparent), arguments.request_id(request_id)
        )
        metadata = [*tracer.propagators.headers(span.context), *authorization]
        metadata += [("x-request-id", request_id)] if request_id else []
        stream = AsyncStream(self._endpoints, request, self._retry, deadline_s, metadata, span)
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)
            stream.cancel()
            span.end(len(stream.tokens))

    async def generate(
        self,
        prompt: str | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        traceparent: str | TraceContext = "",
        token: str = "",
        request_id: str = "",
    ) -> Completion:
        """Generate to the end. Arguments and errors as for `stream`."""
        async with self.stream(
            prompt,
            params,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            timeout_s=timeout_s,
            traceparent=traceparent,
            token=token,
            request_id=request_id,
        ) as stream:
            async for _ in stream:
                pass
            return stream.completion

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrent: int = DEFAULT_MAX_CONCURRENT,
        timeout_s: float | None = None,
        token: str = "",
    ) -> list[Completion]:
        """Generate from several prompts at the same time.

        Args:
            prompts: each a text, or token ids.
            params: for all of them, or one for each. A seed that is given once is that of each.
            max_concurrent: most generations at a time.
            timeout_s: deadline of each, in seconds, from its own start.
            token: as for `stream`.

        Returns:
            The completions, in the order of the prompts.

        Raises:
            InvalidRequestError: names the argument; nothing was sent.
            SpecwireError: of the first generation that failed; the others are cancelled.
        """
        requests = arguments.many(prompts, params)
        slots = asyncio.Semaphore(arguments.concurrency(max_concurrent))

        async def generate(text: str | None, ids: Sequence[int] | None, params: SamplingParams) -> Completion:
            async with slots:
                return await self.generate(
                    text, params, prompt_token_ids=ids, timeout_s=timeout_s, token=token
                )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(generate(*each)) for each in requests]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def get_model_info(
        self, *, timeout_s: float = 10.0, token: str = ""
    ) -> tuple[ModelInfo, ModelInfo | None]:
        """The target, and the draft while one is reachable; `token` as for `stream`."""
        request = generation_pb2.GetModelInfoRequest()
        response = await self._endpoints.unary(
            "GetModelInfo", request, arguments.timeout(timeout_s), self._authorization(token)
        )
        if not response.HasField("target"):
            raise InternalError("the coordinator does not say which target it serves")
        draft = model_info_from_proto(response.draft) if response.HasField("draft") else None
        return model_info_from_proto(response.target), draft

    async def get_tokenizer(self, *, timeout_s: float = 60.0, token: str = "") -> TokenizerFiles:
        """The files of the target's tokenizer; `token` as for `stream`.

        Raises:
            HandshakeError: they are too large, or others than announced.
        """
        authorization = self._authorization(token)
        ends_s = asyncio.get_running_loop().time() + arguments.timeout(timeout_s)

        async def page(offset: int) -> bytes:
            request = generation_pb2.GetTokenizerRequest(offset=offset)
            left_s = max(0.0, ends_s - asyncio.get_running_loop().time())
            response = await self._endpoints.unary("GetTokenizer", request, left_s, authorization)
            received: bytes = response.page
            return received

        target, _ = await self.get_model_info(timeout_s=timeout_s, token=token)
        return await fetch(target, page)

    async def get_status(
        self, *, if_num_streams: Sequence[int] = (), timeout_s: float = 10.0, token: str = ""
    ) -> generation_pb2.GetStatusResponse:
        """The coordinator's current status.

        Args:
            if_num_streams: numbers of streams to say for how it would draft.
            token: as for `stream`.
        """
        request = generation_pb2.GetStatusRequest(if_num_streams=if_num_streams)
        status: generation_pb2.GetStatusResponse = await self._endpoints.unary(
            "GetStatus", request, arguments.timeout(timeout_s), self._authorization(token)
        )
        return status

    def _authorization(self, token: str) -> list[tuple[str, str]]:
        """The token of a call as metadata; it is protected like the client's own.

        Raises:
            InvalidRequestError: the token would travel in plaintext.
        """
        if not token:
            return []
        for address in self._addresses:
            replace(self._credentials, token=token).check(address)
        return [("authorization", f"Bearer {token}")]


class Client:
    """A client of a coordinator, for synchronous code; may be shared between threads.

    Arguments and errors are those of `AsyncClient`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: RetryPolicy = DEFAULT_RETRY,
        tls: TLS | None = None,
        token: str = "",
        allow_plaintext: bool = False,
        tracer: Tracing | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        # Within a call the garbage collector may close a generator, and a stream with it.
        self._calling = threading.RLock()
        self._closed = False
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="specwire-client", daemon=True)
        self._thread.start()
        options = {"timeout_s": timeout_s, "retry": retry, "tls": tls, "token": token, "tracer": tracer}
        options["allow_plaintext"] = allow_plaintext
        try:
            self._client: AsyncClient = self._run(_call(AsyncClient, address, **options))
        except BaseException:
            self._end_thread()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel and end the thread; running generations are cancelled. In a process that was
        forked, which has neither, do nothing."""
        if os.getpid() != self._process_id:
            return
        with self._closing:
            if self._closed:
                return
            self._run(self._end())
            with self._calling:  # calls that came before are on the loop, and none comes after
                self._closed = True
            self._end_thread()

    def _serve(self) -> None:
        """On a thread of its own: where the caller has a loop, as in a notebook, no other one may run."""
        self._loop.run_forever()
        self._cancel_late_calls()
        self._loop.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _cancel_late_calls(self) -> None:
        """Cancel calls of other threads that came while the loop was ending: they would wait for ever."""
        self._loop.run_until_complete(asyncio.sleep(0))  # their calls become tasks
        late = asyncio.all_tasks(self._loop)
        for task in late:
            task.cancel()
        if late:
            self._loop.run_until_complete(asyncio.wait_for(asyncio.wait(late), timeout=1.0))

    @contextlib.contextmanager
    def stream(
        self, prompt: str | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[Stream]:
        """Generate, chunk by chunk; options and errors as for `AsyncClient.stream`."""
        arguments.options(options)
        context = self._client.stream(prompt, params, **options)
        stream = self._run(context.__aenter__())
        try:
            yield Stream(stream, self._run)
        finally:
            # At interpreter exit the thread is gone, and `close` has cancelled the stream already.
            if threading.current_thread() is self._thread:  # closed by the garbage collector, there by chance
                self._loop.create_task(context.__aexit__(None, None, None))
            elif not sys.is_finalizing():
                with contextlib.suppress(SpecwireError):
                    self._run(context.__aexit__(None, None, None))

    def generate(
        self, prompt: str | None = None, params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """Generate to the end; options and errors as for `AsyncClient.generate`."""
        arguments.options(options)
        return self._run(self._client.generate(prompt, params, **options))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Generate from several prompts at the same time; as `AsyncClient.generate_many`."""
        arguments.options(options)
        return self._run(self._client.generate_many(prompts, params, **options))

    def get_model_info(
        self, *, timeout_s: float = 10.0, token: str = ""
    ) -> tuple[ModelInfo, ModelInfo | None]:
        """The target, and the draft while one is reachable; `token` as for `AsyncClient.stream`."""
        return self._run(self._client.get_model_info(timeout_s=timeout_s, token=token))

    def get_tokenizer(self, *, timeout_s: float = 60.0, token: str = "") -> TokenizerFiles:
        """The files of the target's tokenizer; as `AsyncClient.get_tokenizer`."""
        return self._run(self._client.get_tokenizer(timeout_s=timeout_s, token=token))

    def get_status(
        self, *, if_num_streams: Sequence[int] = (), timeout_s: float = 10.0, token: str = ""
    ) -> generation_pb2.GetStatusResponse:
        """See `AsyncClient.get_status`."""
        return self._run(
            self._client.get_status(if_num_streams=if_num_streams, timeout_s=timeout_s, token=token)
        )

    async def _end(self) -> None:
        """Close the channel, and let other threads' calls end before the loop stops."""
        await self._client.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        if running:
            await asyncio.wait(running, timeout=1.0)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if os.getpid() != self._process_id:
            work.close()
            raise RequestCancelledError("the client is that of the process before a fork; make one after it")
        with self._calling:
            if self._closed:
                work.close()
                raise RequestCancelledError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RequestCancelledError("the client is closed") from None
        except BaseException:
            future.cancel()
            raise


async def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a plain function on the loop's thread."""
    return function(*args, **kwargs)
