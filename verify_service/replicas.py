"""`specwire verify --replicas N`: N verify services, each a child process with a port of its own."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import NoReturn

from specwire.cli.kept import KeptServices
from specwire.cli.process import READY, end_on_signals, wait_ready
from specwire.config.fields import next_address
from specwire.config.services import VerifyConfig
from specwire.engine.group.instance import Instance, isolated_environ
from specwire.engine.group.placement import require_ray
from specwire.errors import ServiceUnavailableError


def run(config: VerifyConfig) -> NoReturn:
    """Run supervised replicas until a signal.

    Raises:
        ConfigError: one of them cannot start, with its own reason.
        ServiceUnavailableError: the Ray instance that they share has ended.
    """
    end_on_signals(terminated=0)
    with contextlib.ExitStack() as stack:
        instance = stack.enter_context(_shared_instance(config))
        ray_address = instance.ready() if instance else config.ray_address
        environ = isolated_environ() if instance else {}
        kept = stack.enter_context(KeptServices(config.grace_s, environ=environ))
        for index in range(config.replicas):
            own = _config_of(config, index, ray_address)
            kept.add(f"verify service {index + 1}", ["verify_service"], own)
        wait_ready(kept.services)
        print(f"{READY}{','.join(each.address for each in kept.services)}", flush=True)
        kept.keep(partial(_check, instance, kept))


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


def _check(instance: Instance | None, kept: KeptServices) -> None:
    """End all if the instance has ended: ServiceUnavailableError."""
    if instance and (status := instance.process.poll()) is not None:
        kept.kill()
        raise ServiceUnavailableError(f"the Ray instance ended with status {status}")
