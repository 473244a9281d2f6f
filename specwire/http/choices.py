"""The generations of one request: n at once, each paused when the client does not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from specwire import AsyncClient
from specwire.completion import Chunk, Completion
from specwire.core import SamplingParams
from specwire.http.bodies.part import Prompt
from specwire.telemetry.tracing import Span

Event = tuple[int, Chunk | Completion]
"""Index of a choice, and its chunk or completion, which is the last event of the choice."""


@dataclass(frozen=True)
class Choice:
    """One generation to run."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    Attributes:
        token: bearer token; empty for none.
        request_id: of the request, the caller's own or the front's.
        span: of the request.
    """

    token: str
    request_id: str
    span: Span


@contextlib.asynccontextmanager
async def running(
    client: AsyncClient, choices: Sequence[Choice], caller: Caller, *, report_progress: bool
) -> AsyncIterator[AsyncIterator[Event]]:
    """Run all choices; leaving the context cancels them on all services.

    Events of different choices are interleaved as they arrive. Each choice holds at most one event that is
    not consumed; its generation then pauses, by the SDK's credit.

    Raises:
        SpecwireError: from the iterator: the error of the first that fails.
    """
    events: asyncio.Queue[Event | Exception] = asyncio.Queue(maxsize=1)

    async def run(index: int, choice: Choice) -> None:
        try:
            async with client.stream(
                params=choice.params,
                **choice.prompt,
                token=caller.token,
                traceparent=caller.span.context,
                request_id=caller.request_id,
                report_progress=report_progress,
            ) as stream:
                async for chunk in stream:
                    await events.put((index, chunk))
                await events.put((index, stream.completion))
        except Exception as error:
            await events.put(error)

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, choice in enumerate(choices):
            tasks.append(asyncio.create_task(run(index, choice)))
            await asyncio.sleep(0)  # each may send a large prompt: let other tasks run in between
        yield _taken(events, len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _taken(events: asyncio.Queue[Event | Exception], num_running: int) -> AsyncIterator[Event]:
    while num_running:
        event = await events.get()
        if isinstance(event, Exception):
            raise event
        num_running -= isinstance(event[1], Completion)
        yield event
