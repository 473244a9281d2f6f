"""The client of one generation, which reads at its own pace. Knows no grpc.

    nothing is being written ──▶ what a round brought is written as soon as the next round is asked for
    a write is under way ──▶ what later rounds bring waits, and is one message then
    8 rounds wait (1, if each is to be a message), or there is no credit ──▶ the generation waits ──▶
        StreamIdleError after `idle_timeout_s`

A write lasts as long as gRPC's flow control blocks it, which is while the client does not read. All streams
begin their writes together, once a turn of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

from coordinator.credit import Credit
from specwire.errors import StreamIdleError

_MAX_UNWRITTEN_ROUNDS = 8

Take = Callable[[], Any]
"""Returns the next message; called when it can be written."""


class Writes:
    """When the streams of an event loop begin to write: together, after the next rounds' requests have left,
    for which devices wait.
    """

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def put(self, begin: Callable[[], None]) -> None:
        """Call this then; it must not raise."""
        if not self._due:
            # In the next turn what is asked for in this one is sent; it is the turn after that.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._begin_all)
        self._due.append(begin)

    def _begin_all(self) -> None:
        due, self._due = self._due, []
        for begin in due:
            begin()


class Stepped:
    """Runs a coroutine without a task: to its first wait at once, and on whenever what it waits for is done.

    For a coroutine that asks for no task, as timeouts do. At its end `on_end` is called, with its error if it
    failed.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[BaseException | None], None]
    ) -> None:
        self._coroutine = coroutine
        self._on_end = on_end
        self._waits_for: asyncio.Future[Any] | None = None
        self._step()

    def _step(self, _: object = None) -> None:
        try:
            self._waits_for = future = self._coroutine.send(None)
        except StopIteration:
            self._on_end(None)
        except (Exception, asyncio.CancelledError) as error:
            self._on_end(error)
        else:
            if future is None:
                asyncio.get_running_loop().call_soon(self._step)
            else:
                future._asyncio_future_blocking = False  # the answer to `await`, as a task gives it
                future.add_done_callback(self._step)

    def cancel(self) -> None:
        """Raise `CancelledError` where it waits."""
        if self._waits_for is not None:
            self._waits_for.cancel()


@dataclass
class CreditReader:
    """Writes messages in order, and knows when the client is ready for another round.

    As a context manager it finishes writing however its body ends, except after a `StreamIdleError`, since
    the client is not reading. For one event loop.

    Attributes:
        write: returns when the message has been handed to the transport.
        credit: how far the generation may be ahead, in tokens.
        idle_timeout_s: longest wait without an acknowledgement or the end of a write, in seconds.
        writes: of all streams.
        has_each: whether each round is a message.
    """

    write: Callable[[Any], Awaitable[None]]
    credit: Credit
    idle_timeout_s: float
    writes: Writes
    has_each: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self._most_unwritten = 1 if self.has_each else _MAX_UNWRITTEN_ROUNDS
        self._unwritten: deque[Take] = deque()
        self._num_unwritten_rounds = 0
        self._is_writing = False  # or about to; still so after a write has failed
        self._writing: Stepped | None = None
        self._error: BaseException | None = None
        self._write_error: BaseException | None = None
        self._changed = asyncio.Event()
        self._now_s = asyncio.get_running_loop().time
        self._active_s = self._now_s()

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
            self._unwritten.clear()
            if self._writing is not None:
                self._writing.cancel()

    # --- messages to the client ---------------------------------------------------------------------

    def send(self, take: Take) -> None:
        """Write what `take` returns; once, where it is the same as at the last call and not called yet.

        Returns at once; see `Writes` for when it is written.
        """
        if not self._unwritten or self._unwritten[-1] is not take:
            self._unwritten.append(take)
        self._num_unwritten_rounds += 1
        self._active_s = self._now_s()
        if not self._is_writing:
            self._is_writing = True
            self.writes.put(self._begin_to_write)

    def _begin_to_write(self) -> None:
        self._writing = Stepped(self._write_all(), self._end_writing)

    async def _write_all(self) -> None:
        while self._unwritten:
            self._num_unwritten_rounds = 0
            await self.write(self._unwritten.popleft()())
            self._note_activity()

    def _end_writing(self, error: BaseException | None) -> None:
        if error is None:
            self._is_writing = False
        else:
            self._write_error = error
            self.fail(error)

    # --- signs of life from the client --------------------------------------------------------------

    def acknowledge(self, num_tokens: int) -> None:
        """The client consumed `num_tokens` more. Errors as for `Credit.acknowledge`."""
        self.credit.acknowledge(num_tokens)
        self._note_activity()

    def fail(self, error: BaseException) -> None:
        """End the generation with this error before its next round."""
        self._error = error
        self._changed.set()

    def _note_activity(self) -> None:
        self._active_s = self._now_s()
        self._changed.set()

    # --- waiting for the client ---------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a round may start."""
        return (
            self._error is None and self._num_unwritten_rounds < self._most_unwritten and self.credit.has_room
        )

    async def ready(self) -> None:
        """Wait until a round may start.

        Raises:
            StreamIdleError: the client took nothing for too long.
            Exception: passed to `fail`, or raised by a write.
        """
        await self._until(lambda: self._error is not None or self.is_ready)
        if self._error is not None:
            raise self._error

    async def _flush(self) -> None:
        """Wait until everything is written; raises the error of a write, or `StreamIdleError`."""
        await self._until(lambda: not self._is_writing or self._write_error is not None)
        if self._write_error is not None:
            raise self._write_error

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._active_s + self.idle_timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                raise StreamIdleError(f"no token was taken for {self.idle_timeout_s:g} s") from None
