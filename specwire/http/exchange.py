"""One request on the wire: its generations run at once, as long as its client is connected.

Each is paused while the client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from specwire import AsyncClient
from specwire.completion import Chunk, Completion, Speculation
from specwire.core import SamplingParams
from specwire.http.access import mark_failed
from specwire.http.answers import Answer, Json
from specwire.http.bodies.generating import Sampled
from specwire.http.bodies.part import Prompt
from specwire.http.errors import ApiError, api_error
from specwire.http.responses import ResponsesAnswer

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # or nginx would buffer tokens
]


def refusal(told: ApiError) -> JSONResponse:
    """An error as the whole response."""
    return JSONResponse(told.body(), status_code=told.status, headers=told.headers)


_TOKEN_DEPTH = 5
"""Of a token's log probabilities in a response: choices, a choice, its logprobs, a list, and the token."""
Answered = Answer | ResponsesAnswer
"""One response in the form of its API."""
Choice = tuple[Prompt, SamplingParams]
"""One generation to run."""
Event = tuple[int, Chunk | Completion]
"""Index of a choice, and its chunk or completion, which is the last event of the choice."""


@dataclass(eq=False)
class Exchange:
    """The response of a generating request, streamed or at once.

    The status line waits for the first event: an error until then is raised, as routes raise theirs, and has
    its own status; a later one ends the stream with an error event, without `[DONE]`.
    """

    client: AsyncClient
    token: str
    choices: Sequence[Choice]
    answer: Answered
    body: Sampled
    _completions: dict[int, Completion] = field(default_factory=dict, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # After the grace period uvicorn cancels requests, and would log a traceback of each.
        with contextlib.suppress(asyncio.CancelledError):
            await while_connected(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._running(scope) as events:
            if self.body.stream:
                await self._stream(await anext(events), events, scope, send)
            else:
                self._completions = {i: each async for i, each in events if isinstance(each, Completion)}
                whole = await asyncio.to_thread(self._whole)  # log probabilities take long
                await whole(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _running(self, scope: Scope) -> AsyncIterator[AsyncIterator[Event]]:
        """Run all choices; leaving the context cancels them on all services.

        Events of different choices are interleaved as they arrive; the error of the first that fails is
        raised. Each choice holds at most one event that is not consumed; its generation then pauses, by the
        SDK's credit.
        """
        events: asyncio.Queue[Event | Exception] = asyncio.Queue(maxsize=1)

        async def run(index: int, prompt: Prompt, params: SamplingParams) -> None:
            try:
                async with self.client.stream(
                    params=params,
                    **prompt,
                    token=self.token,
                    traceparent=scope["specwire.span"].context,
                    request_id=scope["specwire.request_id"],
                    report_progress=self.body.reports_progress,
                ) as stream:
                    async for chunk in stream:
                        await events.put((index, chunk))
                    await events.put((index, stream.completion))
            except Exception as error:
                await events.put(self.body.renamed(error))

        async def taken() -> AsyncIterator[Event]:
            num_running = len(self.choices)
            while num_running:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                num_running -= isinstance(event[1], Completion)
                yield event

        tasks: list[asyncio.Task[None]] = []
        try:
            for index, choice in enumerate(self.choices):
                tasks.append(asyncio.create_task(run(index, *choice)))
                await asyncio.sleep(0)  # each may send a large prompt: let other tasks run in between
            yield taken()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, first: Event, events: AsyncIterator[Event], scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            for index in range(len(self.choices)):
                await _send_events(send, self.answer.first(index))
            await self._send_event_of(send, *first)
            async for index, event in events:
                await self._send_event_of(send, index, event)
            await _send_events(send, self.answer.usage(self._in_order()))
            await send(_body(self.answer.end))
        except Exception as error:
            told = api_error(error)
            mark_failed(scope, error, told.status)
            await _send_events(send, self.answer.error(told.body()))
        await send(_body(b"", more=False))

    async def _send_event_of(self, send: Send, index: int, event: Any) -> None:
        if isinstance(event, Completion):
            self._completions[index] = event
            await _send_events(send, self.answer.finish(index, event))
        else:
            await _send_events(send, self.answer.chunk(index, event))

    def _whole(self) -> JSONResponse:
        choices = itertools.chain.from_iterable(map(_choices_of, self._in_order()))
        return _Whole(self.answer.whole([*choices]))

    def _in_order(self) -> list[Completion]:
        return [self._completions[index] for index in range(len(self.choices))]


class _Whole(JSONResponse):
    """JSON that is written token by token, since the GIL is held while a value is written."""

    def render(self, content: Any) -> bytes:
        return "".join(_written(content, _TOKEN_DEPTH)).encode()


def _written(value: Any, depth: int) -> Iterator[str]:
    if not (depth and value and isinstance(value, dict | list)):
        yield json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return
    is_object = isinstance(value, dict)
    for i, each in enumerate(value):
        yield "," if i else "{" if is_object else "["
        if is_object:
            yield json.dumps(each, ensure_ascii=False) + ":"
        yield from _written(value[each] if is_object else each, depth - 1)
    yield "}" if is_object else "]"


def _choices_of(done: Completion) -> list[Completion]:
    """One completion for each text of a beam search; any other completion alone.

    The first one has the counts of the search, so that they are counted once.
    """
    return [
        replace(
            done,
            text=found.text,
            token_ids=found.token_ids,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_reason,
            usage=replace(done.usage, completion_tokens=len(found.token_ids)),
            speculation=Speculation() if i else done.speculation,
            tokens=(),
            hypotheses=(found,),
        )
        for i, found in enumerate(done.hypotheses)
    ] or [done]


async def _send_events(send: Send, events: Json | Sequence[Json] | None) -> None:
    """Send server-sent events; returns when the connection has room for more. One with a `type` is sent under
    its name."""
    for data in [events] if isinstance(events, dict) else events or ():
        name = f"event: {data['type']}\n" if "type" in data else ""
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        await send(_body(f"{name}data: {text}\n\n".encode()))


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; a client that disconnects cancels it at once."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    leaving = asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
