"""The client of one generation, which reads at its own pace. Knows no grpc.

    nothing is being written ──▶ what a round brought is written at once
    a write is under way ──▶ what later rounds bring waits, and is one message then
    8 rounds wait, or there is no credit ──▶ the generation waits ──▶ StreamIdleError after `idle_timeout_s`

A write lasts as long as gRPC's flow control blocks it, which is while the client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Self

from coordinator.credit import Credit
from specwire.errors import StreamIdleError

_MAX_UNWRITTEN_ROUNDS = 8

Take = Callable[[], Any]
"""Returns the next message; called when it can be written."""


class CreditReader:
    """Writes messages in order, and knows when the client is ready for another round.

    As a context manager it finishes writing however its body ends, except after a `StreamIdleError`, since
    the client is not reading. For one event loop.

    Args:
        write: returns when the message has been handed to the transport.
        credit: how far the generation may be ahead, in tokens.
        idle_timeout_s: longest wait without an acknowledgement or the end of a write, in seconds.
    """

    def __init__(
        self, write: Callable[[Any], Awaitable[None]], credit: Credit, idle_timeout_s: float
    ) -> None:
        self.credit = credit
        self._write = write
        self._idle_timeout_s = idle_timeout_s
        self._unwritten: deque[Take] = deque()
        self._num_unwritten_rounds = 0
        self._writing: asyncio.Task[None] | None = None
        self._has_more: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._active_s = self._now_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is None:
                await self._flush()
            elif not isinstance(error, StreamIdleError):
                with contextlib.suppress(Exception):
                    await self._flush()
        finally:
            if self._writing is not None and not self._writing.cancel() and not self._writing.cancelled():
                self._writing.exception()  # it is raised by `ready`, or something else ended the generation

    # --- messages to the client ---------------------------------------------------------------------

    def send(self, take: Take) -> None:
        """Write what `take` returns; once, where it is the same as at the last call and not called yet.

        Returns at once. Other ready tasks run first: the next round's request is one, and a device waits for
        it.
        """
        if not self._unwritten or self._unwritten[-1] is not take:
            self._unwritten.append(take)
        self._num_unwritten_rounds += 1
        self._active_s = self._now_s
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        elif self._has_more is not None and not self._has_more.done():
            self._has_more.set_result(None)

    async def _write_all(self) -> None:
        """One task for all messages of the stream."""
        try:
            while True:
                while self._unwritten:
                    self._num_unwritten_rounds = 0
                    await self._write(self._unwritten.popleft()())
                    self._note_activity()
                self._has_more = asyncio.get_running_loop().create_future()
                await self._has_more
        except Exception as error:
            self.fail(error)
            raise

    # --- signs of life from the client --------------------------------------------------------------

    def acknowledge(self, num_tokens: int) -> None:
        """The client consumed `num_tokens` more. Errors as for `Credit.acknowledge`."""
        self.credit.acknowledge(num_tokens)
        self._note_activity()

    def fail(self, error: Exception) -> None:
        """End the generation with this error before its next round."""
        self._error = error
        self._changed.set()

    def _note_activity(self) -> None:
        self._active_s = self._now_s
        self._changed.set()

    # --- waiting for the client ---------------------------------------------------------------------

    def is_ready(self, num_tokens: int) -> bool:
        """Whether a round may start, after one that emits so many tokens more."""
        return (
            self._error is None
            and self._num_unwritten_rounds < _MAX_UNWRITTEN_ROUNDS
            and (self.credit.has_room_after(num_tokens) if num_tokens else self.credit.has_room)
        )

    async def ready(self) -> None:
        """Wait until a round may start.

        Raises:
            StreamIdleError: the client took nothing for too long.
            Exception: passed to `fail`, or raised by a write.
        """
        await self._until(lambda: self._error is not None or self.is_ready(0))
        if self._error is not None:
            raise self._error

    async def _flush(self) -> None:
        """Wait until everything is written; raises the error of a write, or `StreamIdleError`."""
        writing = self._writing
        if writing is not None:
            await self._until(lambda: self._is_written or writing.done())
            if writing.done():
                writing.result()

    @property
    def _is_written(self) -> bool:
        is_idle = self._has_more is not None and not self._has_more.done()
        return self._writing is None or (is_idle and not self._unwritten)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._active_s + self._idle_timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                raise StreamIdleError(f"no token was taken for {self._idle_timeout_s:g} s") from None

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
