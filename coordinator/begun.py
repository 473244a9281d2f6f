"""A coroutine that has begun without a task of its own."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
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
