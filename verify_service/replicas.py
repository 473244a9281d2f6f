"""`specwire verify --replicas N`: N verify services, each a child process with a port of its own.

A replica that dies is restarted at the same address. If a replica cannot start the first time, the command
ends: restarting it would fail in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from itertools import chain

from specwire.cli.kept import KeptService
from specwire.cli.process import Service, wait_ready
from specwire.cli.supervisor import device_of
from specwire.config.fields import next_address
from specwire.config.flags import flag_words
from specwire.config.services import VerifyConfig
from specwire.engine.group.instance import Instance, isolated_environ
from specwire.engine.group.placement import require_ray
from specwire.errors import ServiceUnavailableError

_POLL_S = 0.1


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
        await asyncio.gather(*(replica.stop(config.grace_s) for replica in replicas))


class LocalReplica(KeptService):
    """One verify service."""

    def __init__(self, config: VerifyConfig, environ: dict[str, str]) -> None:
        """Start it; it does not serve yet.

        Args:
            environ: added to the environment of the process.
        """
        self._config, self._environ = config, environ
        super().__init__()

    def _start(self, address: str) -> Service:
        self._config = replace(self._config, address=address or self._config.address)
        words = [flag_words(field.name, getattr(self._config, field.name)) for field in fields(self._config)]
        return Service("verify_service", [*chain(*words)], self._environ)

    @property
    def name(self) -> str:
        """See `KeptService`."""
        return f"verify service {self.service.address or self._config.address}"


def _shared_instance(config: VerifyConfig) -> AbstractContextManager[Instance | None]:
    """One Ray instance for all replicas: separate instances would assign the same devices."""
    if config.tensor_parallel_size == 1 or config.ray_address:
        return contextlib.nullcontext()
    require_ray(config.tensor_parallel_size)
    return Instance(config.tensor_parallel_size * config.replicas if config.device == "cpu" else 1)


def _config_of(config: VerifyConfig, index: int, ray_address: str) -> VerifyConfig:
    """The config of one replica: its own ports, device and share of memory."""
    share = config.replicas if config.device != "cuda" else 1  # of one device's memory
    return replace(
        config,
        replicas=1,
        address=next_address("address", config.address, index),
        metrics_address=next_address("metrics_address", config.metrics_address, index),
        device=device_of(config, index),
        ray_address=ray_address,
        kv_cache_memory=config.kv_cache_memory / share,
    )


async def _watch(instance: Instance) -> None:
    """Raises:
    ServiceUnavailableError: the instance ended.
    """
    while instance.process.poll() is None:  # noqa: ASYNC110 - of another process
        await asyncio.sleep(_POLL_S)
    raise ServiceUnavailableError(f"the Ray instance ended with status {instance.process.returncode}")
