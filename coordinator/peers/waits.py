"""Waits with time limits that share one timer: a round of a stream makes no timer of its own."""

from __future__ import annotations

import asyncio
import math
from typing import Any


class Waits:
    """For one event loop."""

    def __init__(self) -> None:
        self._due_s: dict[asyncio.Future[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf

    async def of(self, future: asyncio.Future[Any], timeout_s: float) -> Any:
        """The future's result.

        Raises:
            TimeoutError: it has none in time; the future is done then.
        """
        if future.done() or timeout_s == math.inf:
            return await future
        if timeout_s <= 0:
            future.cancel()
            raise TimeoutError
        due_s = future.get_loop().time() + timeout_s
        self._due_s[future] = due_s
        if due_s < self._timer_s:
            self._arm(due_s)
        try:
            return await future
        finally:
            self._due_s.pop(future, None)

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = asyncio.get_running_loop().call_at(due_s, self._expire)

    def _expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._timer, self._timer_s = None, math.inf
        for future, due_s in list(self._due_s.items()):
            if due_s <= now_s:
                del self._due_s[future]
                if not future.done():
                    future.set_exception(TimeoutError())
        if self._due_s:
            self._arm(min(self._due_s.values()))
