"""Service processes that are restarted when they end, after a pause that grows with each failure in a row."""

from __future__ import annotations

import abc
import asyncio
import logging
import time

from specwire.cli.supervisor import Service, wait_ready
from specwire.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 60.0
"""A process that served for this long did not fail because of its start."""
_STOP_MARGIN_S = 5.0


class KeptService(abc.ABC):
    """A service process, and the ones that replace it.

    Attributes:
        service: the process at present.
    """

    def __init__(self) -> None:
        """Start it; it does not serve yet."""
        self._num_failures = 0
        self.service = self._start()

    @abc.abstractmethod
    def _start(self) -> Service:
        """A new process."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What logs call it."""

    async def keep(self) -> None:
        """Restart it whenever it ends, until cancelled."""
        while True:
            served_s = await self._ended()
            self._num_failures = 0 if served_s > _STEADY_S else self._num_failures + 1
            status = self.service.process.returncode
            await self._pause(f"ended with status {status}")
            while (problem := await self._try()) is not None:
                self._num_failures += 1
                await self._pause(f"does not start: {problem}")
            log.warning("%s serves again", self.name)

    async def stop(self, grace_s: float) -> None:
        """Shut it down gracefully; kill it after its grace period."""
        self.service.terminate()
        await asyncio.to_thread(self.service.stop, grace_s + _STOP_MARGIN_S)

    async def _ended(self) -> float:
        """Wait until it ends; returns for how many seconds it served."""
        started_s = time.monotonic()
        while self.service.process.poll() is None:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - started_s

    async def _pause(self, why: str) -> None:
        seconds = pause_s(self._num_failures)
        log.warning("%s %s; it starts again in %g s", self.name, why, seconds)
        await asyncio.sleep(seconds)

    async def _try(self) -> ConfigError | None:
        """Start it; the reason if that failed, None when it serves."""
        self.service = self._start()
        try:
            await asyncio.to_thread(wait_ready, [self.service])
        except ConfigError as error:
            return error
        return None


def pause_s(num_failures: int) -> float:
    """Seconds before the next start, after `num_failures` failures in a row, at least 1.

    >>> [pause_s(n) for n in (1, 2, 3, 100)]
    [0.5, 1.0, 2.0, 30.0]
    """
    return float(min(_FIRST_PAUSE_S * 2 ** min(num_failures - 1, 10), _LONGEST_PAUSE_S))
