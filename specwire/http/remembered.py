"""What many requests ask the coordinator for is asked once, and kept for a moment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Answer = TypeVar("Answer")

_FRESH_S = 1.0
"""How long an answer is good for: a restarted coordinator may serve another model."""
_MAX_ANSWERS = 1024
"""A flood of keys, such as wrong tokens, costs no more memory; older answers are then asked for again."""


class _Asked(Generic[Answer]):
    """A question under way, or its answer."""

    def __init__(self, question: Coroutine[Any, Any, Answer]) -> None:
        self._ended_s = math.inf
        self.task = asyncio.create_task(question)
        self.task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Answer]) -> None:
        self._ended_s = asyncio.get_running_loop().time()
        if not task.cancelled():
            task.exception()  # no defect when all who waited for it have left

    @property
    def is_stale(self) -> bool:
        return asyncio.get_running_loop().time() - self._ended_s > _FRESH_S


class Remembered(Generic[Key, Answer]):
    """Answers by what was asked, errors included; requests that ask the same at a time share one answer."""

    def __init__(self, ask: Callable[[Key], Coroutine[Any, Any, Answer]]) -> None:
        self._ask = ask
        self._asked: dict[Key, _Asked[Answer]] = {}

    async def get(self, key: Key) -> Answer:
        """The answer, at most a second old; raises what asking raises."""
        asked = self._asked.get(key)
        if asked is None or asked.is_stale:
            self._asked.pop(key, None)  # the order is that of asking
            if len(self._asked) >= _MAX_ANSWERS:
                del self._asked[next(iter(self._asked))]
            asked = self._asked[key] = _Asked(self._ask(key))
        return await asyncio.shield(asked.task)  # others may wait for it too
