"""Each chunk is written while the next round begins; whatever ends the rounds, nothing of theirs is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.servicer import write_chunks
from specwire.completion import Chunk
from specwire.errors import InvalidRequestError
from specwire.v1 import generation_pb2


class Context:
    """Notes what is written, each time after a moment."""

    def __init__(self) -> None:
        self.written: list[int] = []

    async def write(self, message: generation_pb2.GenerateResponse) -> None:
        await asyncio.sleep(0)
        self.written.append(message.chunk.first_index)


async def chunks(error: BaseException | None) -> AsyncIterator[Chunk]:
    for first_index in range(3):
        yield Chunk(text="", tokens=(), rejected=(), first_index=first_index)
    if error is not None:
        raise error


@pytest.mark.parametrize(
    "error", [None, InvalidRequestError("credit_tokens", 0, "must be at least 1"), asyncio.CancelledError()]
)
async def test_all_are_written(error: BaseException | None) -> None:
    context = Context()
    if error is None:
        await write_chunks(chunks(None), generation_pb2.ResumeInfo(), context)
    else:
        with pytest.raises(type(error)):
            await write_chunks(chunks(error), generation_pb2.ResumeInfo(), context)
    assert context.written == [0, 1, 2]
