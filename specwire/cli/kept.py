"""Service processes that are restarted when they end, after a pause that grows with each failure in a row.

Replicas (`verify --replicas N`) and workers (`coordinator --workers N`, `http --workers N`) are children of
one process that serves no request, and share nothing. One that ends is started again at its address; a worker
that hangs is ended first. If one cannot start the first time, the command ends: its next start would fail in
the same way. Replicas have ports of their own; workers have one port, where the kernel gives each new
connection to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specwire.cli.process import STOP_MARGIN_S, Service, wait_ready
from specwire.config.client import HttpConfig
from specwire.config.fields import next_address
from specwire.config.flags import config_words, flag_words
from specwire.config.services import CoordinatorConfig
from specwire.errors import ConfigError, ServiceUnavailableError

log = logging.getLogger(__name__)

_POLL_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 60.0
"""A process that served for this long did not fail because of its start."""
MAX_SILENCE_S = 10.0
"""A process that shows signs of life, one a second, and has shown none for so long hangs. An event loop that
works is never kept so long, by whatever else a machine does."""
_WORKER = "_SPECWIRE_WORKER"
"""In the environment of a worker."""


class KeptService(Service):
    """A service whose process is replaced at the same address when it ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        config: Any,
        environ: Mapping[str, str] | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        max_failures: float = math.inf,
        max_silence_s: float = math.inf,
    ) -> None:
        """Start it; it does not serve yet.

        Args:
            name: what logs call it.
            command: module, and words before the flags.
            config: what all flags are set to.
            environ: added to the environment of the process.
            aliases: of flags that its errors are to name in another way.
            max_failures: in a row; after so many it is not started again.
            max_silence_s: without a sign of life (`run_until_signal`), after which `keep` ends it by force.
        """
        self.name = name
        self._max_failures = max_failures
        self._num_failures = 0
        self._max_silence_s, self._silence_s = max_silence_s, 0.0
        self._served_at: list[str] = []
        self._serving_since_s = self._due_s = math.inf
        module, *words = command
        super().__init__(module, [*words, *config_words(config, aliases)], environ)

    def restart_if_due(self, now_s: float) -> None:
        """See what became of it, and start it again after its pause; never blocks. It has served once. If it
        failed too often in a row, ServiceUnavailableError has the reason of the last time."""
        if now_s >= self._due_s:
            self._due_s = math.inf
            self.start(*self._served_at)
        elif self._due_s < math.inf:
            pass
        elif not self.address:
            self._look_whether_ready(now_s)
        elif self.process.poll() is not None:
            self._served_at = flag_words(address=self.address)
            if now_s - self._serving_since_s > _STEADY_S:
                self._num_failures = 0
            self._failed(f"ended with status {self.process.returncode}", now_s)
        else:
            self._serving_since_s = min(self._serving_since_s, now_s)

    def _look_whether_ready(self, now_s: float) -> None:
        output = self.process.stdout
        assert output is not None
        try:
            if select.select([output], [], [], 0)[0] and self.read_address():
                self._serving_since_s = now_s
                log.warning("%s serves again", self.name)
        except ConfigError as error:
            self._failed(f"does not start: {error}", now_s)

    def _failed(self, why: str, now_s: float) -> None:
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            raise ServiceUnavailableError(f"{self.name} {why}, {self._num_failures} times in a row")
        seconds = pause_s(self._num_failures)
        log.warning("%s %s; it starts again in %g s", self.name, why, seconds)
        self._due_s = now_s + seconds

    async def keep(self) -> None:
        """End it if it hangs, restart it whenever it ends, until cancelled. Raises as `restart_if_due`."""
        while True:
            self.restart_if_due(time.monotonic())
            # Silence is counted in our own polls: when the whole machine pauses, neither does anything.
            is_silent = self.address and not self.shows_life()
            self._silence_s = self._silence_s + _POLL_S if is_silent else 0.0
            if self._silence_s > self._max_silence_s:
                log.warning("%s hangs: no sign of life for %g s", self.name, self._max_silence_s)
                await asyncio.to_thread(self.stop, 0.0)
                self._silence_s = 0.0
            await asyncio.sleep(_POLL_S)


def pause_s(num_failures: int) -> float:
    """Seconds before the next start, after `num_failures` failures in a row, at least 1.

    >>> [pause_s(n) for n in (1, 2, 3, 100)]
    [0.5, 1.0, 2.0, 30.0]
    """
    return float(min(_FIRST_PAUSE_S * 2 ** min(num_failures - 1, 10), _LONGEST_PAUSE_S))


@contextlib.asynccontextmanager
async def keeping(
    replicas: Sequence[KeptService], grace_s: float, *others: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Keep replicas serving while the body runs, which begins when all serve; then shut them down gracefully.

    One that cannot start raises ConfigError, with its reason. `others` run meanwhile, and end all by theirs.
    """
    try:
        await asyncio.to_thread(wait_ready, replicas)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run()) for run in (*(each.keep for each in replicas), *others)]
            yield
            for task in tasks:
                task.cancel()
        for replica in replicas:
            replica.terminate()
        await asyncio.gather(*(asyncio.to_thread(each.stop, grace_s + STOP_MARGIN_S) for each in replicas))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for replica in replicas:
            replica.kill()


@contextlib.asynccontextmanager
async def workers(command: Sequence[str], config: CoordinatorConfig | HttpConfig) -> AsyncIterator[str]:
    """`config.workers` processes at one port; yields its `HOST:PORT`. Metrics are at consecutive ports.
    Raises ConfigError if the address cannot be bound, or as `keeping`."""
    from specwire.rpc import listening  # which imports gRPC: `--help` waits for nothing

    with listening.reserved(config.address) as address:
        made = []
        for number in range(config.workers):
            metrics = next_address("metrics_address", config.metrics_address, number)
            own = replace(config, address=address, metrics_address=metrics)
            name, environ = f"worker {number + 1} at {address}", {_WORKER: "1"}
            made.append(KeptService(name, command, own, environ, max_silence_s=MAX_SILENCE_S))
        async with keeping(made, config.grace_s):
            yield address


def is_worker() -> bool:
    """Whether this process is one of those that `workers` starts."""
    return _WORKER in os.environ
