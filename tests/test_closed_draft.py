"""A draft stream that is closed while its peer cannot be reached leaves no task behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.drafting import _DraftStream
from specwire.errors import ServiceUnavailableError
from specwire.v1 import draft_pb2


class Unreached:
    """A call whose connection never comes; it ends when it is cancelled."""

    def __init__(self) -> None:
        self._cancelled = asyncio.Event()

    async def send(self, request: Any) -> None:
        await asyncio.Event().wait()

    async def read(self) -> Any:
        await self._cancelled.wait()
        raise ServiceUnavailableError("the stream was cancelled")

    def cancel(self) -> None:
        self._cancelled.set()


async def test_closed_before_it_was_reached() -> None:
    before = asyncio.all_tasks()
    stream = _DraftStream(Unreached())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.ask([1, 2, 3], draft_pb2.DraftRequest(num_draft_tokens=2))
    left = asyncio.all_tasks() - before
    assert left
    stream.close()
    done, pending = await asyncio.wait(left, timeout=10)
    assert done == left
    assert not pending
