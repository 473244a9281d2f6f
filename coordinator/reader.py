"""The client of one generation, which reads at its own pace. Knows no grpc.

    message k written ──▶ round k+2 may start, if there is credit
    message k not written, or no credit ──▶ the generation waits ──▶ StreamIdleError after `idle_timeout_s`

A write lasts as long as gRPC's flow control blocks it, which is while the client does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Self

from coordinator.credit import Credit
from specwire.errors import StreamIdleError


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
        self._before_last: asyncio.Task[None] | None = None
        self._last: asyncio.Task[None] | None = None
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
            if self._last is not None:
                self._last.cancel()

    # --- messages to the client ---------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Queue a message; returns at once."""
        self._before_last = self._last
        self._last = asyncio.create_task(self._write_after(self._last, message))
        self._active_s = self._now_s

    async def _write_after(self, before: asyncio.Task[None] | None, message: Any) -> None:
        """Other ready tasks run first: the next round's request is one, and a device waits for it."""
        await asyncio.sleep(0)
        try:
            if before is not None:
                await before
            await self._write(message)
        except Exception as error:
            self.fail(error)
            raise
        self._note_activity()

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

    @property
    def is_ready(self) -> bool:
        """Whether a round may start, and nothing has failed."""
        return self._error is None and self._has_room

    async def ready(self) -> None:
        """Wait until a round may start.

        Raises:
            StreamIdleError: the client took nothing for too long.
            Exception: passed to `fail`, or raised by a write.
        """
        await self._until(lambda: self._error is not None or self._has_room)
        if self._error is not None:
            raise self._error

    async def _flush(self) -> None:
        """Wait until everything is written; raises the error of a write, or `StreamIdleError`."""
        await self._until(lambda: _is_done(self._last))
        if self._last is not None:
            self._last.result()

    @property
    def _has_room(self) -> bool:
        return self.credit.has_room and _is_done(self._before_last)

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


def _is_done(writing: asyncio.Task[None] | None) -> bool:
    return writing is None or writing.done()
