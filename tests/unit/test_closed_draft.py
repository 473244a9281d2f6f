"""A sequence at the draft service, as the coordinator has it: what the peer holds, and how it ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.generation import Plan
from coordinator.peers.draft_sequence import DraftSequence
from coordinator.peers.link import SharedLink, draft_codec
from coordinator.peers.waits import Waits
from specwire.core import Preparation, Proposal, SamplingParams, Timings
from specwire.errors import ServiceUnavailableError
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import model as wire
from specwire.rpc.wire.draft import DraftAnswer, DraftOrder
from specwire.v1 import draft_pb2

VOCAB_SIZE = 100


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


CHAIN_OF_4 = Plan(4, patience_s=math.inf)


def sequence_of(call: Any, on_answer: Callable[[], None] = lambda: None) -> tuple[SharedLink, DraftSequence]:
    link = SharedLink(call, draft_codec(VOCAB_SIZE))
    replica: Any = SimpleNamespace(num_lost=0, link=lambda: link, mark_proven=on_answer)
    opening = wire.open_sequence(SamplingParams(temperature=0, seed=1), 3)
    return link, DraftSequence(replica, opening, None, waits=Waits())


async def test_closed_before_it_was_reached() -> None:
    before = asyncio.all_tasks()
    link, sequence = sequence_of(Unreached())
    with pytest.raises(TimeoutError):
        await sequence.request([1, 2, 3], CHAIN_OF_4, timeout_s=0.01)
    left = asyncio.all_tasks() - before
    assert left
    sequence.close()
    link.close()
    done, _ = await asyncio.wait(left, timeout=10)
    assert done == left


async def test_a_wait_ends_with_its_sequence() -> None:
    link, sequence = sequence_of(Unreached())
    asking = asyncio.create_task(sequence.request([1, 2, 3], CHAIN_OF_4, timeout_s=60.0))
    await asyncio.sleep(0)
    sequence.close()
    with pytest.raises(ServiceUnavailableError, match="the sequence was closed"):
        await asking
    assert link.error is None
    link.close()


class Scripted:
    """A call that takes down what is sent, and answers when it is told to."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[DraftOrder] = asyncio.Queue()
        self.answers: asyncio.Queue[draft_pb2.DraftResponse] = asyncio.Queue()

    async def send(self, request: Any) -> None:
        for order in draft_wire.orders_from_proto(request):
            self._sent.put_nowait(order)

    async def next_order(self) -> DraftOrder:
        return await asyncio.wait_for(self._sent.get(), 10)

    async def read(self) -> Any:
        return await self.answers.get()

    def cancel(self) -> None:
        pass


async def test_the_rest_of_a_late_chain_is_not_taken_for_what_the_peer_holds() -> None:
    """The peer rolls back to what it is told; its late chain was no branch, and is gone then."""
    call, answered = Scripted(), asyncio.Event()
    link, sequence = sequence_of(call, answered.set)
    committed = [1, 2, 3]
    with pytest.raises(TimeoutError):
        await sequence.request(committed, CHAIN_OF_4, timeout_s=0)
    sequence.abandon()
    sent = [await call.next_order()]
    committed = [*committed, 10]  # a plain round, which comes to the chain's first token
    late = DraftAnswer(1, 1, Proposal(3, [10, 11, 12, 13]), Timings())
    call.answers.put_nowait(draft_wire.response_to_proto([late], [], [], "i", 0))
    await asyncio.wait_for(answered.wait(), 10)
    rest = sequence.prepared.take(committed)
    assert rest is not None
    sequence.continue_from(committed, rest.proposal, Preparation(1, 4))
    committed = [*committed, 11, 12, 40]
    asking = asyncio.create_task(sequence.request(committed, CHAIN_OF_4, timeout_s=60.0))
    sent += [await call.next_order() for _ in range(2)]
    held = 0
    for order in sent:
        assert order.base_len <= held
        held = order.base_len + len(order.token_ids)
    assert held == len(committed)
    asking.cancel()
    link.close()
