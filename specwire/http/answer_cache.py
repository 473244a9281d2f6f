"""A short-lived cache of the coordinator's answers, shared by concurrent requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Answer = TypeVar("Answer")

_FRESH_S = 1.0
"""Lifetime of an answer: a restarted coordinator may serve another model."""
_MAX_ANSWERS = 1024
"""Bounds memory under a flood of keys, such as wrong tokens; older answers are evicted."""


class _Entry(Generic[Answer]):
    """A running request, or its answer."""

    def __init__(self, question: Coroutine[Any, Any, Answer]) -> None:
        self._ended_s = math.inf
        self.task = asyncio.create_task(question)
        self.task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Answer]) -> None:
        self._ended_s = asyncio.get_running_loop().time()
        if not task.cancelled():
            task.exception()  # retrieved, as all who waited for it may have disconnected

    @property
    def is_stale(self) -> bool:
        return asyncio.get_running_loop().time() - self._ended_s > _FRESH_S


class AnswerCache(Generic[Key, Answer]):
    """Answers and errors by key; concurrent requests for the same key share one answer."""

    def __init__(self, ask: Callable[[Key], Coroutine[Any, Any, Answer]]) -> None:
        self._ask = ask
        self._entries: dict[Key, _Entry[Answer]] = {}

    async def get(self, key: Key) -> Answer:
        """The answer, at most a second old; raises what `ask` raises."""
        entry = self._entries.get(key)
        if entry is None or entry.is_stale:
            self._entries.pop(key, None)  # keeps insertion order
            if len(self._entries) >= _MAX_ANSWERS:
                del self._entries[next(iter(self._entries))]
            entry = self._entries[key] = _Entry(self._ask(key))
        return await asyncio.shield(entry.task)  # others may wait for it as well
