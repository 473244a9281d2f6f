"""Ranks as Ray actors: one for each device, packed on one machine if possible, else across machines.

Ray places, starts and ends processes, and reports when one died. Steps do not use it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import Any

from specwire.config.services import ModelServiceConfig
from specwire.engine.group.instance import Instance, first_line, isolated_environ
from specwire.errors import ConfigError, ServiceUnavailableError


def require_ray(num_ranks: int) -> None:
    """A ConfigError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks}: needs Ray, which is not installed; "
            "pip install 'specwire[ray]' brings it"
        )


class Placement:
    """Devices for all ranks in a Ray cluster, reserved until `close`: GPUs, or CPU cores.

    The cluster runs at `ray_address`, with this machine as a part; without one an instance on loopback is
    started, which ends with this process, however that ends. An existing connection is used as it is.

    Raises:
        ConfigError: there is no such cluster, or it has too few devices.
        ServiceUnavailableError: the devices are in use.

    Attributes:
        host, node_id: this machine's address in the cluster, and Ray's name for it.
    """

    def __init__(self, config: ModelServiceConfig) -> None:
        self._num_ranks = config.tensor_parallel_size
        self._resource = "GPU" if config.device.startswith("cuda") else "CPU"
        self._instance: Instance | None = None
        self._owns_connection = False
        try:
            self._owns_connection = self._connect(config.ray_address)
            self.host, self.node_id = _where()
            self._group = self._reserve(config.load_timeout_s)
        except BaseException:
            self._disconnect()
            raise

    def start(self, actor: type[Any]) -> list[Any]:
        """A process for each rank, in no particular order; handles to the actors, at once."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return [
            ray.remote(actor)
            .options(
                num_cpus=int(self._resource == "CPU"),
                num_gpus=int(self._resource == "GPU"),
                max_restarts=0,  # a single rank is useless: the driver restarts all of them
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
            for bundle in range(self._num_ranks)
        ]

    def close(self) -> None:
        """Release the devices; end the instance if this object started it."""
        import ray

        with contextlib.suppress(Exception):  # the cluster may have ended
            ray.util.remove_placement_group(self._group)
        self._disconnect()

    def _connect(self, address: str) -> bool:
        """Connect; False if this process was connected already."""
        loaded = sys.modules.get("ray")  # not imported yet, as its variables must be set before that
        if loaded is not None and loaded.is_initialized():
            return False
        if not address:
            os.environ |= isolated_environ()
            self._instance = Instance(self._num_ranks if self._resource == "CPU" else 1)
        import ray  # takes as long as the start of the instance

        target = self._instance.ready() if self._instance else address
        try:
            ray.init(address=target, logging_level="error", log_to_driver=False)
        except Exception as error:
            what = f"--ray-address {address}: cannot be used" if address else "Ray does not start"
            raise ConfigError(f"{what}: {first_line(error)}") from error
        return True

    def _reserve(self, timeout_s: float) -> Any:
        import ray

        total = ray.cluster_resources().get(self._resource, 0)
        if total < self._num_ranks:
            raise ConfigError(
                f"--tensor-parallel-size {self._num_ranks}: the Ray cluster has {total:g} {self._resource}s"
            )
        group = ray.util.placement_group([{self._resource: 1}] * self._num_ranks, strategy="PACK")
        if not group.wait(timeout_s):
            ray.util.remove_placement_group(group)
            raise ServiceUnavailableError(
                f"--tensor-parallel-size {self._num_ranks}: {self._num_ranks} {self._resource}s of the Ray "
                f"cluster were not free within {timeout_s:g} s"
            )
        return group

    def _disconnect(self) -> None:
        import ray

        if self._owns_connection:
            ray.shutdown()
        if self._instance is not None:
            self._instance.close()


def _where() -> tuple[str, str]:
    """Address and Ray's name of the machine that this process runs on."""
    import ray

    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()


def devices() -> tuple[str, str, str]:
    """Of the calling actor: its machine's address and Ray name, and its device's name on that machine."""
    import ray

    gpus = ray.get_gpu_ids()
    return *_where(), f"cuda:{gpus[0]}" if gpus else "cpu"


def kill(actors: list[Any]) -> None:
    """Kill the processes at once, whatever they are doing."""
    import ray

    for actor in actors:
        with contextlib.suppress(Exception):  # it has ended, or the cluster has
            ray.kill(actor, no_restart=True)
