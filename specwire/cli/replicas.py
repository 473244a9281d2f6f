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
from typing import Any

from specwire.cli.kept import MAX_SILENCE_S, KeptService
from specwire.cli.process import Service, wait_ready
from specwire.config.client import HttpConfig
from specwire.config.fields import next_address
from specwire.config.flags import config_words
from specwire.config.services import CoordinatorConfig

_WORKER = "_SPECWIRE_WORKER"
"""In the environment of a worker."""


def replica(
    name: str,
    command: Sequence[str],
    config: Any,
    environ: Mapping[str, str],
    *,
    max_silence_s: float = math.inf,
) -> KeptService:
    """Start one of the processes, and those that replace it; it does not serve yet.

    Args:
        name: what logs call it.
        command: module, and words before the flags.
        config: what all flags are set to.
        environ: added to the environment of the process.
        max_silence_s: see `KeptService`.
    """
    module, *words = command

    def start(address: str) -> Service:
        flags = config_words(replace(config, address=address) if address else config)
        # Files without a name, as `supervisor` passes tokens, are inherited.
        named = [re.fullmatch("/dev/fd/([0-9]+)", word) for word in flags]
        pass_fds = [int(found[1]) for found in named if found]
        return Service(module, [*words, *flags], environ, pass_fds=pass_fds)

    return KeptService(name, start, max_silence_s=max_silence_s)


@contextlib.asynccontextmanager
async def kept(
    replicas: Sequence[KeptService], grace_s: float, *others: Callable[[], Coroutine[Any, Any, None]]
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

    Args, errors: as of `replica` and `kept`.

    Raises:
        ConfigError: the address cannot be bound.
    """
    from specwire.rpc import listening  # which imports gRPC: `--help` waits for nothing

    with listening.reserved(config.address) as address:
        made = []
        for number in range(config.workers):
            metrics = next_address("metrics_address", config.metrics_address, number)
            own = replace(config, address=address, metrics_address=metrics)
            name, environ = f"worker {number + 1} at {address}", {_WORKER: "1"}
            made.append(replica(name, command, own, environ, max_silence_s=MAX_SILENCE_S))
        async with kept(made, config.grace_s):
            yield address


def is_worker() -> bool:
    """Whether this process is one of those that `workers` starts."""
    return _WORKER in os.environ
