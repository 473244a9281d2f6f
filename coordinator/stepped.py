"""A coroutine that runs without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Stepped:
    """Runs a coroutine to its first wait at once, and on whenever what it waits for is done.

    For a coroutine that asks for no task, as timeouts do: it has none.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[BaseException | None], None]
    ) -> None:
        """Args:
        on_end: called when it has ended, with its error if it failed.
        """
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
