"""Coroutines without tasks: one that has begun before it is awaited, and one that is never awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Begun(Generic[Result]):
    """Runs a coroutine to its first wait at once, and the rest when it is awaited.

    What it waits for goes on meanwhile, as with a task; but there is nothing to schedule. An error is raised
    where it is awaited. For the task that made it, which awaits it once or closes it.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._error: BaseException | None = None
        self._step(None)

    def _step(self, thrown: BaseException | None) -> None:
        """Run it to its next wait or its end."""
        self._is_waiting = False
        try:
            self._waits_for = self._coroutine.throw(thrown) if thrown else self._coroutine.send(None)
            self._is_waiting = True
        except StopIteration as end:
            self._result = end.value
        except Exception as error:
            self._error = error

    def __await__(self) -> Generator[Any, Any, Result]:
        while self._is_waiting:
            thrown = None
            try:
                yield self._waits_for
            except BaseException as error:
                thrown = error
            self._step(thrown)
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result

    def close(self) -> None:
        """It is not awaited: it ends where it waits."""
        self._coroutine.close()


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
