"""The connections to one coordinator: one, or where it has several workers, one to each of them.

The kernel chooses the worker of a connection. Answers name it (`x-specwire-worker: 2/4`), so that a client
with streams on every connection opens another one while a worker has none, and a new stream goes to the
worker with the fewest of this client's streams. A client with a stream at a time stays with one connection.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from specwire.v1 import generation_pb2_grpc

_TRIES = 8
"""Connections for each worker: of so many tries, one in 256 finds the same of two workers each time."""
_HEADER = "x-specwire-worker"
_WORKER = re.compile("([0-9]{1,3})/([0-9]{1,3})")


class Connection:
    """One of them.

    Attributes:
        stub: of the GenerationService.
        worker: its other end, by number; 0 until that is known.
        num_streams: that this client has open there.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.worker = self.num_streams = 0

    @property
    def is_ready(self) -> bool:
        """Whether a stream would begin at once."""
        return bool(self.channel.get_state() is grpc.ChannelConnectivity.READY)


class Connections:
    """All of a client to one coordinator.

    Args:
        open_channel: opens a channel with a connection of its own.
    """

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._all = [Connection(open_channel())]
        self._num_workers = 1
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def first(self) -> Connection:
        """For calls that are answered at once."""
        return self._all[0]

    def generate(self, timeout_s: float, metadata: Any) -> tuple[Connection, Any]:
        """Begin a stream, on a connection to the worker with the fewest of this client's."""
        connection = self._least_loaded() if self._num_workers > 1 else self.first
        call = connection.stub.Generate(timeout=timeout_s, metadata=metadata)
        connection.num_streams += 1
        call.add_done_callback(lambda _: self._ended(connection))
        return connection, call

    async def answered(self, connection: Connection, call: Any) -> None:
        """Learn from a call that has its first response which worker has sent it."""
        for key, value in await call.initial_metadata():
            if key == _HEADER and (found := _WORKER.fullmatch(value)):
                connection.worker, self._num_workers = int(found[1]), int(found[2])

    async def close(self) -> None:
        """Close the channels and cancel their calls."""
        for connection in self._all:
            await connection.channel.close()

    def _least_loaded(self) -> Connection:
        known = {each.worker for each in self._all} - {0}
        has_more = len(known) < self._num_workers and len(self._all) < _TRIES * self._num_workers
        if has_more and all(each.num_streams for each in self._all):
            self._all.append(Connection(self._open_channel()))
            return self._all[-1]
        load: Counter[int] = Counter()
        for each in self._all:
            load[each.worker] += each.num_streams

        def rank(each: Connection) -> tuple[bool, int, int]:
            return not each.is_ready, load[each.worker] if each.worker else each.num_streams, each.num_streams

        return min(self._all, key=rank)

    def _ended(self, connection: Connection) -> None:
        """Close a connection without streams whose worker has another."""
        connection.num_streams -= 1
        others = {each.worker for each in self._all if each is not connection}
        if connection.num_streams or connection.worker not in others or connection is self.first:
            return
        self._all.remove(connection)
        closing = asyncio.create_task(connection.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
