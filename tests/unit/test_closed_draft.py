"""The coordinator's side of a draft stream: what it says the peer holds, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from coordinator.peers.draft_stream import DraftStream

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
    stream = DraftStream(Unreached())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.request([1, 2, 3], draft_pb2.DraftRequest(num_draft_tokens=2))
    left = asyncio.all_tasks() - before
    assert left
    stream.close()
    done, pending = await asyncio.wait(left, timeout=10)
    assert done == left
    assert not pending


class Scripted:
    """A call that takes down what is sent, and answers when it is told to."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[draft_pb2.DraftRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[draft_pb2.DraftResponse] = asyncio.Queue()

    async def send(self, request: Any) -> None:
        self.sent.put_nowait(request)

    async def read(self) -> Any:
        return await self.answers.get()

    def cancel(self) -> None:
        pass


async def test_the_rest_of_a_late_chain_is_not_taken_for_what_the_peer_holds() -> None:
    """The peer rolls back to what it is told; its late chain was no branch, and is gone then."""
    call = Scripted()
    stream = DraftStream(call)
    committed = [1, 2, 3]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await stream.request(committed, draft_pb2.DraftRequest(num_draft_tokens=4))
    stream.abandon()
    committed = [*committed, 10]  # a plain round, which comes to the chain's first token
    late = draft_pb2.Proposal(token_ids=[10, 11, 12, 13])
    call.answers.put_nowait(draft_pb2.DraftResponse(request_id=1, base_len=3, proposals=[late]))
    await stream._arrived.wait()
    rest = stream.prepared.take(committed)
    assert rest is not None
    stream.continue_from(committed, rest.proposal, draft_pb2.DraftRequest())
    committed = [*committed, 11, 12, 40]
    asking = asyncio.create_task(stream.request(committed, draft_pb2.DraftRequest(num_draft_tokens=4)))
    held = 0
    for request in [await call.sent.get() for _ in range(3)]:
        assert request.base_len <= held
        held = request.base_len + len(request.token_ids)
    assert held == len(committed)
    asking.cancel()
    stream.close()
