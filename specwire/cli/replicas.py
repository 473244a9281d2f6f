"""Several processes of one service that share nothing, as children of one that serves no request.

One that ends is started again at its address; a worker that hangs is ended first. If one cannot start the
first time, the command ends: its next start would fail in the same way. Replicas (`verify --replicas N`) have
ports of their own. Workers (`coordinator --workers N`, `http --workers N`) have one port, where the kernel
gives each new connection to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from specwire.cli.kept import MAX_SILENCE_S, KeptService
from specwire.cli.process import Service, wait_ready
from specwire.config.client import HttpConfig
from specwire.config.fields import next_address
from specwire.config.flags import flag_words, settings_of
from specwire.config.services import CoordinatorConfig

_WORKER = "_SPECWIRE_WORKER"
"""In the environment of a worker."""


class Replica(KeptService):
    """One of the processes, and those that replace it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        config: Any,
        environ: Mapping[str, str],
        *,
        max_silence_s: float = math.inf,
    ) -> None:
        """Start it; it does not serve yet.

        Args:
            name: what logs call it.
            command: module, and words before the flags.
            config: what all flags are set to.
            environ: added to the environment of the process.
            max_silence_s: see `KeptService`.
        """
        self._name, self._command, self._config, self._environ = name, command, config, environ
        super().__init__(max_silence_s=max_silence_s)

    def _start(self, address: str) -> Service:
        config = replace(self._config, address=address) if address else self._config
        values = {field.name: getattr(config, field.name) for field in settings_of(type(config))}
        module, *words = self._command
        flags = chain(*(flag_words(name, value) for name, value in values.items()))
        # Files without a name, as `supervisor` passes tokens, are inherited.
        named = [re.fullmatch("/dev/fd/([0-9]+)", str(value)) for value in values.values()]
        return Service(
            module, [*words, *flags], self._environ, pass_fds=[int(found[1]) for found in named if found]
        )

    @property
    def name(self) -> str:
        """See `KeptService`."""
        return f"{self._name} {self.service.address or self._config.address}"


@contextlib.asynccontextmanager
async def kept(
    replicas: Sequence[Replica], grace_s: float, *others: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Keep replicas serving while the body runs, which begins when all serve; then shut them down gracefully.

    Args:
        others: run meanwhile; what one of them raises ends everything.

    Raises:
        ConfigError: one of them cannot start, with its own reason.
    """
    try:
        await asyncio.to_thread(wait_ready, [replica.service for replica in replicas])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run()) for run in (*(each.keep for each in replicas), *others)]
            yield
            for task in tasks:
                task.cancel()
        await asyncio.gather(*(replica.stop(grace_s) for replica in replicas))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for replica in replicas:
            replica.service.kill()


@contextlib.asynccontextmanager
async def workers(command: Sequence[str], config: CoordinatorConfig | HttpConfig) -> AsyncIterator[str]:
    """`config.workers` processes at one port; yields its `HOST:PORT`. Metrics are at consecutive ports.

    Args, errors: as of `Replica` and `kept`.

    Raises:
        ConfigError: the address cannot be bound.
    """
    from specwire.rpc import listening  # which imports gRPC: `--help` waits for nothing

    with listening.reserved(config.address) as address:
        made = []
        for number in range(config.workers):
            own = replace(config, address=address)
            if isinstance(own, CoordinatorConfig):
                metrics = next_address("metrics_address", own.metrics_address, number)
                own = replace(own, metrics_address=metrics)
            name, environ = f"worker {number + 1} at", {_WORKER: "1"}
            made.append(Replica(name, command, own, environ, max_silence_s=MAX_SILENCE_S))
        async with kept(made, config.grace_s):
            yield address


def is_worker() -> bool:
    """Whether this process is one of those that `workers` starts."""
    return _WORKER in os.environ
