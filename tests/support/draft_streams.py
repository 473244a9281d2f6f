"""Messages of a stream to the draft service, as a coordinator writes and reads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from draft_service.inner.hierarchy import Hierarchy
from draft_service.servicer import DraftServicer, DraftStream
from specwire.core import SamplingParams
from specwire.engine.boot import ModelService
from specwire.engine.streams import Limits
from specwire.errors import SpecwireError
from specwire.proposals.pushes import Arrived
from specwire.rpc.wire import columns
from specwire.rpc.wire import draft as draft_wire
from specwire.rpc.wire import model as wire
from specwire.rpc.wire.draft import DraftAnswer, DraftOrder, PreparedAnswer
from specwire.telemetry.tracing import Tracing
from specwire.v1 import common_pb2, draft_pb2


class Received(NamedTuple):
    """What one message of the service holds."""

    answers: list[DraftAnswer]
    prepared: list[PreparedAnswer]
    errors: dict[int, SpecwireError]


def opening(sequence_id: int, params: SamplingParams, prompt_len: int) -> common_pb2.OpenSequence:
    message = wire.open_sequence(params, prompt_len)
    message.sequence_id = sequence_id
    return message


def received(message: draft_pb2.DraftResponse) -> Received:
    return Received(
        draft_wire.answers_from_proto(message, 2**31),
        draft_wire.prepared_from_proto(message.prepared, 2**31),
        {error.sequence_id: columns.error_from_proto(error) for error in message.errors},
    )


class FakeCall:
    """A call of `Draft` without a network: the context and the requests of one stream.

    Attributes:
        may_write: while it is not set, writing a message does not end, as over a link that is full.
        serving: what serves it.
    """

    serving: asyncio.Task[None]

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._arrived = Arrived()
        self._requests: asyncio.Queue[draft_pb2.DraftRequest | None] = asyncio.Queue()
        self._responses: asyncio.Queue[draft_pb2.DraftResponse] = asyncio.Queue()

    # --- the coordinator's end ---

    def send(
        self,
        orders: Sequence[DraftOrder] = (),
        opened: Sequence[common_pb2.OpenSequence] = (),
        closed: Sequence[int] = (),
    ) -> None:
        message = draft_wire.request_to_proto(opened, closed, orders)
        message.num_arrived_bytes = self._arrived.report()
        self._requests.put_nowait(message)

    def half_close(self) -> None:
        self._requests.put_nowait(None)

    async def read(self) -> Received:
        """The next message."""
        async with asyncio.timeout(20):
            return self._received(await self._responses.get())

    def unread(self) -> list[Received]:
        """All messages that were written and not read."""
        return [self._received(self._responses.get_nowait()) for _ in range(self._responses.qsize())]

    def _received(self, message: draft_pb2.DraftResponse) -> Received:
        if message.HasField("prepared"):
            self._arrived.add(message.ByteSize())
        return received(message)

    # --- the service's end ---

    async def requests(self) -> Any:
        while (message := await self._requests.get()) is not None:
            yield message

    async def write(self, message: draft_pb2.DraftResponse) -> None:
        self._responses.put_nowait(message)
        await self.may_write.wait()

    def peer(self) -> str:
        return "test"


@contextlib.asynccontextmanager
async def draft_stream(
    service: ModelService, limits: Limits | None = None, hierarchy: Hierarchy | None = None
) -> AsyncIterator[tuple[FakeCall, DraftStream]]:
    """A stream that is served meanwhile. The body may end it by `half_close` or by what it sends, or leaves
    that to the end, where an error of the stream is raised."""
    servicer = DraftServicer(
        service, Tracing(), max_outcomes=32, max_support=16, limits=limits, hierarchy=hierarchy
    )
    call = FakeCall()
    stream = servicer.stream(call)
    call.serving = asyncio.create_task(stream.serve(call.requests()))
    yield call, stream
    call.half_close()
    call.may_write.set()
    async with asyncio.timeout(20):
        await call.serving
