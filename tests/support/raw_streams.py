"""The protocol itself: streams that a test cuts where it likes."""

from __future__ import annotations

from typing import Any, Self

import grpc
import grpc.aio

from specwire import (
    Completion,
)
from specwire.client.resume import ReceivedTokens
from specwire.rpc import channel
from specwire.rpc.wire import client as client_wire
from specwire.v1 import generation_pb2, generation_pb2_grpc


class Wire:
    """The protocol itself: streams that a test cuts where it likes."""

    def __init__(self, address: str) -> None:
        self._channel = channel.open_channel(address)
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def read(self, request: generation_pb2.GenerateRequest, most: int = 10**9) -> list[Any]:
        """Messages of a stream up to its end, or up to a cut."""
        call = self._stub.Generate(iter([request]), timeout=60)
        messages: list[Any] = []
        while len(messages) < most and (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        call.cancel()
        return messages

    async def generate(self, request: generation_pb2.GenerateRequest, *cuts: int) -> Completion:
        """A generation whose stream is cut after so many messages, again and again, then not."""
        progress = ReceivedTokens(request)
        for most in cuts:
            for message in await self.read(progress.request(), most):
                assert message.WhichOneof("event") == "chunk", "cut too late"
                progress.take(message)
        messages = await self.read(progress.request())
        for message in messages[:-1]:
            progress.take(message)
        return client_wire.completion_from_proto(messages[-1].completion, progress.tokens)
