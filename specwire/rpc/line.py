"""Calls between a process and its parent, over a pair of sockets. Knows no grpc.

Either end calls methods of the other by name. Messages are pickled, as both ends run this code:

    call number, name, arguments ──▶        ◀── done number, result  |  failed number, error
    cancel number                ──▶        it is answered all the same: done, if it was too late
    tell name, arguments         ──▶        is not answered
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any

from specwire.errors import RequestCancelledError, ServiceUnavailableError, SpecwireError

log = logging.getLogger(__name__)

Methods = Mapping[str, Callable[..., Any]]
"""By name: coroutine functions are called, others told."""
_NUM_LENGTH_BYTES = 4


class Line:
    """One end. For one event loop.

    Attributes:
        is_open: set as soon as this end may call.

    Args:
        methods: of this end, for the other one to call.
    """

    def __init__(self, methods: Methods) -> None:
        self._methods = methods
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}  # by this end, not answered
        self._answers: dict[int, asyncio.Task[Any]] = {}  # to calls of the other
        self._writer: asyncio.StreamWriter | None = None
        self.is_open = asyncio.Event()

    def open(self, end: socket.socket) -> asyncio.Task[None]:
        """Take messages until the other end closes, in a task; then the calls of the other end are cancelled,
        and ours fail with ServiceUnavailableError."""
        self._serving = asyncio.create_task(self._serve(end))
        return self._serving

    async def _serve(self, end: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=end)
        self.is_open.set()
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    length = int.from_bytes(await reader.readexactly(_NUM_LENGTH_BYTES))
                    self._take(*pickle.loads(await reader.readexactly(length)))
        finally:
            self._end()

    def start(self, method: str, *args: object) -> asyncio.Future[Any]:
        """Call a method of the other end; the result or error is the future's. `cancel` cancels the call."""
        call: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._calls[number] = call
        if not self._send("call", number, method, args):
            del self._calls[number]
            call.set_exception(_lost())
        return call

    async def call(self, method: str, *args: object) -> Any:
        """The result of a method of the other end, or its error; a call that is cancelled ends there too."""
        call = self.start(method, *args)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self.cancel(call)
            raise

    def cancel(self, call: asyncio.Future[Any]) -> None:
        """Ask the other end to cancel a call, which may be done by then: only the future says."""
        call.add_done_callback(lambda done: done.exception())  # it may be read by no one
        for number, each in self._calls.items():
            if each is call:
                self._send("cancel", number)

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the other end without an answer; nothing happens if it is gone."""
        self._send("tell", method, args)

    def _send(self, *message: object) -> bool:
        if self._writer is None or self._writer.is_closing():
            return False
        data = pickle.dumps(message)
        self._writer.write(len(data).to_bytes(_NUM_LENGTH_BYTES) + data)
        return True

    def _take(self, kind: str, *parts: Any) -> None:
        if kind == "tell":
            name, args = parts
            self._methods[name](*args)
        elif kind == "call":
            number, name, args = parts
            answer = self._answers[number] = asyncio.create_task(self._methods[name](*args))
            answer.add_done_callback(functools.partial(self._answer, number, name))
        elif kind == "cancel":
            if (called := self._answers.get(parts[0])) is not None:
                called.cancel()
        elif (call := self._calls.pop(parts[0], None)) is not None and not call.done():
            (call.set_result if kind == "done" else call.set_exception)(parts[1])

    def _answer(self, number: int, name: str, answer: asyncio.Task[Any]) -> None:
        del self._answers[number]
        if answer.cancelled():
            self._send("failed", number, RequestCancelledError(f"{name} was cancelled"))
        elif (error := answer.exception()) is None:
            self._send("done", number, answer.result())
        elif isinstance(error, SpecwireError):
            self._send("failed", number, error)
        else:
            log.error("defect in %s", name, exc_info=error)
            self._send("failed", number, ServiceUnavailableError(f"{name} failed"))

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for answer in self._answers.values():
            answer.cancel()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(_lost())
        self._calls.clear()


async def join(fd: int, methods: Methods) -> tuple[Line, int, Any]:
    """A worker's end of the line to its parent, its number and the config that it is to serve with.

    Args:
        fd: inherited.
    """
    line = Line({"check": _do_nothing, **methods})
    line.open(socket.socket(fileno=fd))
    await line.is_open.wait()
    return line, *await line.call("config")


async def _do_nothing() -> None:
    pass


def _lost() -> ServiceUnavailableError:
    return ServiceUnavailableError("another process of the service has ended")
