"""`specwire verify --replicas N`: N verify services, each a child process with a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from specwire.cli.kept import KeptService, keeping
from specwire.config.fields import next_address
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
    with _shared_instance(config) as instance:
        ray_address = instance.ready() if instance else config.ray_address
        environ, watch = (isolated_environ(), [partial(_watch, instance)]) if instance else ({}, [])
        configs = [_config_of(config, index, ray_address) for index in range(config.replicas)]
        replicas = [
            KeptService(f"verify service {number}", ["verify_service"], each, environ)
            for number, each in enumerate(configs, 1)
        ]
        async with keeping(replicas, config.grace_s, *watch):
            yield ",".join(each.address for each in replicas)


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
        device=config.device_of(index),
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
