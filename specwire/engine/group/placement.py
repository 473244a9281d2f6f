"""Ranks as Ray actors: one for each device, packed on one machine first, across machines when it must be.

Ray places, starts and ends processes, and tells when one died. It carries no step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from typing import Any

from specwire.engine.thread import ComputeThread
from specwire.errors import ConfigError, ServiceUnavailableError

# A driver's own instance: nothing is kept in its object store, which has a least size.
_OBJECT_STORE_BYTES = 80 << 20
# For an instance of our own, read when Ray is imported: it tells nobody that it runs; as on machines that are
# never part of a cluster it listens on loopback only; and its workers, which do the work here, are not niced.
_ALONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
}


def require_ray(num_ranks: int) -> None:
    """Raises:
    ConfigError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks}: needs Ray, which is not installed; "
            "pip install 'specwire[ray]' brings it"
        )


class Placement:
    """Devices for all ranks in a Ray cluster, reserved until `close`.

    Args:
        address: of a running cluster that this machine is part of; empty starts an instance on loopback,
            which ends with this process. One that this process is connected to already is used as it is.
        num_ranks: devices wanted.
        is_cuda: GPUs, or else CPU cores.
        timeout_s: longest wait for them to be free.

    Raises:
        ConfigError: there is no such cluster, or it will never have so many devices.
        ServiceUnavailableError: the devices are not free.

    Attributes:
        host: this machine's address in the cluster.
    """

    def __init__(self, address: str, num_ranks: int, *, is_cuda: bool, timeout_s: float) -> None:
        self._num_ranks = num_ranks
        self._resource = "GPU" if is_cuda else "CPU"
        self._directory = ""
        # Ray's own processes end with the thread that started them (PR_SET_PDEATHSIG): it must live as long.
        self._thread = ComputeThread("ray")
        self._is_ours = self._thread.call(lambda: self._connect(address))
        try:
            self.host, self._node_id = _where()
            self._group = self._reserve(timeout_s)
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
                max_restarts=0,  # a rank alone is worth nothing: the driver starts all of them again
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            .remote()
            for bundle in range(self._num_ranks)
        ]

    def nearness(self, node_id: str) -> tuple[bool, str]:
        """By what ranks are put in order: those on this machine first, then machine by machine."""
        return node_id != self._node_id, node_id

    def close(self) -> None:
        """Give the devices back; end the instance if it is ours."""
        import ray

        with contextlib.suppress(Exception):  # the cluster may be gone
            ray.util.remove_placement_group(self._group)
        self._disconnect()

    def _connect(self, address: str) -> bool:
        if not address:
            os.environ |= _ALONE
        import ray

        if ray.is_initialized():
            return False
        quiet = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
        try:
            if address:
                del quiet["include_dashboard"]
                ray.init(address=address, **quiet)
            else:
                self._directory = tempfile.mkdtemp(prefix="specwire-ray-")
                ray.init(
                    address="local",
                    num_cpus=self._num_ranks if self._resource == "CPU" else 1,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=self._directory,
                    **quiet,
                )
        except Exception as error:
            self._forget_directory()
            what = f"--ray-address {address}: cannot be used" if address else "Ray does not start"
            raise ConfigError(f"{what}: {_first_line(error)}") from error
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

        if self._is_ours:
            self._thread.call(ray.shutdown)
        self._thread.join()
        self._forget_directory()

    def _forget_directory(self) -> None:
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def _where() -> tuple[str, str]:
    """Address and Ray's name of the machine that this process runs on."""
    import ray

    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()


def devices() -> tuple[str, str, str]:
    """Of the calling actor: address and Ray's name of its machine, and its device as it is named there."""
    import ray

    gpus = ray.get_gpu_ids()
    return *_where(), f"cuda:{gpus[0]}" if gpus else "cpu"


def kill(actors: list[Any]) -> None:
    """End processes at once, whatever they wait for."""
    import ray

    for actor in actors:
        with contextlib.suppress(Exception):  # gone already, or the cluster is
            ray.kill(actor, no_restart=True)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
