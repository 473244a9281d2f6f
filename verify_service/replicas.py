"""`specwire verify --replicas N`: N verify services, each a child process with a port of its own.

A replica that dies is restarted at the same address, after a pause that grows with each failure in a row. If
a replica cannot start the first time, the command ends: restarting it would fail in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from itertools import chain

from specwire.cli.supervisor import Service, check_free, device_of, wait_ready
from specwire.config.fields import split_address
from specwire.config.flags import flag_words
from specwire.config.services import VerifyConfig
from specwire.engine.group.instance import Instance, isolated_environ
from specwire.engine.group.placement import require_ray
from specwire.errors import ConfigError, ServiceUnavailableError

log = logging.getLogger(__name__)

_POLL_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 60.0
"""A replica that served for this long did not fail because of its start."""
_STOP_MARGIN_S = 5.0


@contextlib.asynccontextmanager
async def serving(config: VerifyConfig) -> AsyncIterator[str]:
    """Supervised replicas; yields their addresses, separated by commas, and shuts all down gracefully.

    Raises:
        ConfigError: one of them cannot start, with its own reason.
        ServiceUnavailableError: the Ray instance that they share has ended.
    """
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(_shared_instance(config))
        ray_address = instance.ready() if instance else config.ray_address
        replicas: list[LocalReplica] = []
        stack.callback(lambda: [replica.service.kill() for replica in replicas])
        for index in range(config.replicas):
            replicas.append(
                LocalReplica(_config_of(config, index, ray_address), isolated_environ() if instance else {})
            )
        await asyncio.to_thread(wait_ready, [replica.service for replica in replicas])
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(replica.keep()) for replica in replicas]
                if instance is not None:
                    tasks.append(group.create_task(_watch(instance)))
                yield ",".join(replica.service.address for replica in replicas)
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await asyncio.gather(*(replica.stop() for replica in replicas))


class LocalReplica:
    """One verify service."""

    def __init__(self, config: VerifyConfig, environ: dict[str, str]) -> None:
        """Start it; it does not serve yet.

        Args:
            environ: added to the environment of the process.
        """
        self._config, self._environ = config, environ
        self._num_failures = 0
        self._start()

    def _start(self) -> None:
        words = [flag_words(field.name, getattr(self._config, field.name)) for field in fields(self._config)]
        self.service = Service("verify_service", [*chain(*words)], self._environ)

    async def keep(self) -> None:
        """Restart it whenever it ends, until cancelled."""
        self._config = replace(self._config, address=self.service.address)
        while True:
            served_s = await self._ended()
            self._num_failures = 0 if served_s > _STEADY_S else self._num_failures + 1
            status = self.service.process.returncode
            await self._pause(f"ended with status {status}")
            while (problem := await self._try()) is not None:
                self._num_failures += 1
                await self._pause(f"does not start: {problem}")
            log.warning("verify service %s serves again", self._config.address)

    async def stop(self) -> None:
        """Shut it down gracefully; kill it after its grace period."""
        self.service.terminate()
        await asyncio.to_thread(self.service.stop, self._config.grace_s + _STOP_MARGIN_S)

    async def _ended(self) -> float:
        """Wait until it ends; returns for how many seconds it served."""
        started_s = time.monotonic()
        while self.service.process.poll() is None:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - started_s

    async def _pause(self, why: str) -> None:
        seconds = pause_s(self._num_failures)
        log.warning("verify service %s %s; it starts again in %g s", self._config.address, why, seconds)
        await asyncio.sleep(seconds)

    async def _try(self) -> ConfigError | None:
        """Start it; the reason if that failed, None when it serves."""
        self._start()
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


def _shared_instance(config: VerifyConfig) -> AbstractContextManager[Instance | None]:
    """One Ray instance for all replicas: separate instances would assign the same devices."""
    if config.tensor_parallel_size == 1 or config.ray_address:
        return contextlib.nullcontext()
    require_ray(config.tensor_parallel_size)
    return Instance(config.tensor_parallel_size * config.replicas if config.device == "cpu" else 1)


def _config_of(config: VerifyConfig, index: int, ray_address: str) -> VerifyConfig:
    """The config of one replica: its own ports, device and share of memory.

    Raises:
        ConfigError: its address is in use.
    """
    address, metrics_address = _follow(config.address, index), _follow(config.metrics_address, index)
    check_free("address", address)
    if metrics_address:
        check_free("metrics_address", metrics_address)
    share = config.replicas if config.device != "cuda" else 1  # of one device's memory
    return replace(
        config,
        replicas=1,
        address=address,
        metrics_address=metrics_address,
        device=device_of(config, index),
        ray_address=ray_address,
        kv_cache_memory=config.kv_cache_memory / share,
    )


def _follow(address: str, index: int) -> str:
    """Consecutive ports; 0, which lets the system choose, stays 0."""
    if not address:
        return ""
    host, port = split_address("address", address)
    return f"{host}:{port and port + index}"


async def _watch(instance: Instance) -> None:
    """Raises:
    ServiceUnavailableError: the instance ended.
    """
    while instance.process.poll() is None:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(_POLL_S)
    raise ServiceUnavailableError(f"the Ray instance ended with status {instance.process.returncode}")
