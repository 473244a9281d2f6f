"""The cluster that `KUBECONFIG` points at, with our image under the name in `CLUSTER_IMAGE`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.cluster import CLIENTS, NAMESPACE, Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    image = os.environ.get("CLUSTER_IMAGE", "")
    if not image or not os.environ.get("KUBECONFIG"):
        pytest.skip("no cluster: KUBECONFIG and CLUSTER_IMAGE name one, and our image there")
    here = Cluster(image)
    found = here.kubectl("get", "namespaces", "-o", "name").split()
    ours = {f"namespace/{NAMESPACE}", f"namespace/{CLIENTS}"}
    assert not ours & set(found), "it has our namespaces already"
    with here.clients():
        yield here
    assert here.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found") == "", "something is left behind"
