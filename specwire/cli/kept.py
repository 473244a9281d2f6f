"""Service processes that are restarted when they end, after a pause that grows with each failure in a row.

Replicas (`verify --replicas N`) and workers (`coordinator --workers N`, `http --workers N`) are children of
one process that serves no request, and share nothing. One that ends is started again at its address; a worker
that hangs is ended first. If one cannot start the first time, the command ends: its next start would fail in
the same way. Replicas have ports of their own; workers have one port, where the kernel gives each new
connection to one of them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

from specwire.cli.process import READY, STOP_MARGIN_S, Service, end_on_signals, wait_ready
from specwire.config.client import HttpConfig
from specwire.config.fields import next_address
from specwire.config.flags import config_words, flag_words
from specwire.config.services import CoordinatorConfig
from specwire.errors import ConfigError, ServiceUnavailableError
from specwire.rpc import interrupts

log = logging.getLogger(__name__)

_POLL_S = 0.1
_CANCEL_S = 1.0
"""For a service to cancel by itself what exceeds its grace period."""
_INTERRUPT_MARGIN_S = 0.75
"""After a grace period of 1 s, twice: Ctrl-C ends within 3 s."""
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
            max_silence_s: without a sign of life (`run_until_signal`), after which it is ended by force.
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
        try:
            if self.has_output() and self.read_address():
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

    def end_if_silent(self) -> None:
        """End it by force if it hangs; called every _POLL_S. Silence is counted in calls: when the whole
        machine pauses, neither does anything."""
        is_silent = self.address and not self.shows_life()
        self._silence_s = self._silence_s + _POLL_S if is_silent else 0.0
        if self._silence_s > self._max_silence_s:
            log.warning("%s hangs: no sign of life for %g s", self.name, self._max_silence_s)
            self.stop(0.0)
            self._silence_s = 0.0


def pause_s(num_failures: int) -> float:
    """Seconds before the next start, after `num_failures` failures in a row, at least 1.

    >>> [pause_s(n) for n in (1, 2, 3, 100)]
    [0.5, 1.0, 2.0, 30.0]
    """
    return float(min(_FIRST_PAUSE_S * 2 ** min(num_failures - 1, 10), _LONGEST_PAUSE_S))


class KeptServices:
    """Services that are kept serving; a context manager that leaves no process behind.

    Attributes:
        services: in the order of their starts.
    """

    def __init__(self, grace_s: float, **options: Any) -> None:
        """Args:
        grace_s: what running requests get to finish at the end.
        options: of each `KeptService`.
        """
        self.services: list[KeptService] = []
        self._grace_s, self._options = grace_s, options

    def add(
        self, name: str, command: Sequence[str], config: Any, aliases: Mapping[str, str] | None = None
    ) -> KeptService:
        """Start a service. Arguments as of `KeptService`."""
        with _uninterrupted():
            service = KeptService(name, command, config, aliases=aliases, **self._options)
            self.services.append(service)
        return service

    def keep(self, *checks: Callable[[], None]) -> NoReturn:
        """Restart services that end by themselves, and end those that hang; raises as
        `KeptService.restart_if_due` and as one of `checks`, which are called meanwhile."""
        while True:
            with _uninterrupted():
                for each in self.services:
                    each.restart_if_due(time.monotonic())
                    each.end_if_silent()
                for check in checks:
                    check()
            time.sleep(_POLL_S)

    def stop(self, *, interrupted: bool = False) -> None:
        """Stop all; the first get the grace period.

        Args:
            interrupted: by someone who waits for the end: the grace period is short, and what is late then is
                ended by force without a word.
        """
        margin_s = _INTERRUPT_MARGIN_S if interrupted else STOP_MARGIN_S
        waits_s = [interrupts.GRACE_S if interrupted else self._grace_s + _CANCEL_S, margin_s]
        try:
            for services in self._groups():
                for wait_s in waits_s:
                    _ask_to_end(services, wait_s)
                for service in services:
                    service.kill() if interrupted else service.stop(0.0)
                waits_s = [margin_s]
        finally:
            self.kill()

    def _groups(self) -> Sequence[Sequence[Service]]:
        """Those that are stopped together, one group after the other."""
        return [self.services]

    def kill(self) -> None:
        """Kill all that run."""
        for service in self.services:
            service.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if interrupted:
            log.warning(interrupts.SAID)
        if kind is not None and issubclass(kind, ConfigError):  # one cannot start: none is of use
            self.kill()
        self.stop(interrupted=interrupted)


def _ask_to_end(services: Sequence[Service], timeout_s: float) -> None:
    """Asked once more, they cancel what runs there."""
    for service in services:
        service.terminate()
    ends_s = time.monotonic() + timeout_s
    for service in services:
        service.wait(max(0.0, ends_s - time.monotonic()))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer SIGINT and SIGTERM: a process that is half started cannot be stopped, and its child would run the
    handler between fork and exec."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled elsewhere
        return
    arrived: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def run_workers(command: Sequence[str], config: CoordinatorConfig | HttpConfig) -> NoReturn:
    """Run `config.workers` processes at one port until a signal. Metrics are at consecutive ports. Raises
    ConfigError if the address cannot be bound, or one cannot start."""
    from specwire.rpc import listening  # which imports gRPC: `--help` waits for nothing

    end_on_signals(terminated=0)
    options = {"environ": {_WORKER: "1"}, "max_silence_s": MAX_SILENCE_S}
    with listening.reserved(config.address) as address, KeptServices(config.grace_s, **options) as kept:
        for number in range(config.workers):
            metrics = next_address("metrics_address", config.metrics_address, number)
            own = replace(config, address=address, metrics_address=metrics)
            kept.add(f"worker {number + 1} at {address}", command, own)
        wait_ready(kept.services)
        print(f"{READY}{address}", flush=True)
        kept.keep()


def is_worker() -> bool:
    """Whether this process is one of those that `run_workers` starts."""
    return _WORKER in os.environ
