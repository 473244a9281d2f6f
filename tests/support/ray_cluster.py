"""Two Ray nodes on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NUM_CPUS = 2  # of each node: two ranks are packed on one, four need both


@contextlib.contextmanager
def connected_cluster() -> Iterator[Any]:
    """The cluster; meanwhile this process is connected to it. Skips the test where there is no Ray."""
    ray = pytest.importorskip("ray")
    running = _started(pytest.importorskip("ray.cluster_utils").Cluster)
    try:
        ray.init(address=running.address, log_to_driver=False, logging_level="error")
        yield running
    finally:
        ray.shutdown()
        running.shutdown()


def _started(new_cluster: Callable[[], Any], num_tries: int = 2) -> Any:
    """Ray waits 30 s for a node, which the first one on a slow machine may exceed; the next one does not."""
    running = new_cluster()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_gcs_server_port_wait_time_s", "120")  # a cold start has taken more than 30 s
            for _ in range(2):
                running.add_node(num_cpus=NUM_CPUS, object_store_memory=80 << 20, include_dashboard=False)
        return running
    except Exception as error:
        running.shutdown()
        if num_tries == 1 or "timed out during startup" not in str(error):
            raise
        return _started(new_cluster, num_tries - 1)
