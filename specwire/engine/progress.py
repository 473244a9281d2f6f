"""Detects a device that hangs: a pass that takes far longer than passes cost.

The engine's thread notes when it begins something; the event loop checks periodically. Time counts only while
the loop itself is running: a process that was stopped as a whole has not seen its device hang.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from specwire import clock
from specwire.engine.replies import Replies
from specwire.errors import ServiceUnavailableError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
LEAST_LIMIT_S = 2.0
_TIMES_USUAL = 20.0
"""A pass counts as hung after this many times its usual cost at the earliest."""


class Watchdog:
    """Fails pending replies while the device hangs. The engine thread calls `beat`, the event loop all else.

    Attributes:
        limit_s: longest time that the current operation may take.
        quiet_s: how long there has been work and no beat.
    """

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self.limit_s = LEAST_LIMIT_S
        self.quiet_s = 0.0
        self._num_beats = self._num_seen = 0

    def beat(self, usual_s: float = 0.0, least_s: float = LEAST_LIMIT_S) -> None:
        """An operation begins or has ended.

        Args:
            usual_s: what it usually takes; 0 if that is negligible.
            least_s: lower bound of `limit_s`.
        """
        self.limit_s = max(least_s, _TIMES_USUAL * usual_s)
        self._num_beats += 1

    def look(self, has_work: bool, elapsed_s: float = LOOK_EVERY_S) -> None:
        """Called every `LOOK_EVERY_S`; a late call counts for no longer than that."""
        if self._num_beats != self._num_seen:
            self._num_seen, self.quiet_s = self._num_beats, 0.0
        elif has_work or self.hangs:  # the work of a device that hangs has been failed
            self.quiet_s += min(elapsed_s, LOOK_EVERY_S)
        else:
            self.quiet_s = 0.0

    @property
    def hangs(self) -> bool:
        return self.quiet_s > self.limit_s

    @property
    def silent_s(self) -> float:
        """How long a device that hangs has been silent; 0 while it makes progress."""
        return self.quiet_s if self.hangs else 0.0

    async def watch(self, on_change: Callable[[bool], Awaitable[None]]) -> None:
        """Look for beats until cancelled; `on_change` is called with whether the device makes progress,
        whenever that has changed."""
        looked_ns, was_hung = clock.stopwatch_ns(), False
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_ns = clock.stopwatch_ns()
            self.look(self._replies.num_pending > 0, (now_ns - looked_ns) / 1e9)
            looked_ns, hangs = now_ns, self.hangs
            if hangs:
                error = self._error()
                if not was_hung:
                    log.error("%s: failing %d requests", error, self._replies.num_pending)
                self._replies.fail_pending(error)
            if hangs != was_hung:
                was_hung = hangs
                await on_change(not hangs)

    def check(self) -> None:
        """Raises ServiceUnavailableError while the device hangs."""
        if self.hangs:
            raise self._error()

    def _error(self) -> ServiceUnavailableError:
        return ServiceUnavailableError(
            f"the device hangs: one pass takes over {self.quiet_s:.1f} s, {self.limit_s:.1f} allowed"
        )
