"""Every overlay on a real cluster (`make test-cluster`): texts, policies, kills, rolling restarts, traces.

Each class deploys one, and deletes it at its end. Tests of a class are in order, as one goes on from another.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specwire.config.security.bearer import make_token
from tests.support.certificates import Authority
from tests.support.cluster import CLIENTS, NAMESPACE, SERVICES, Cluster, forwarded
from tests.support.manifests import OVERLAYS, kubectl

COORDINATOR = "dns:///coordinator.specwire:7070"
ONE_ADDRESS = "coordinator.specwire:7070"
FRONT = "http.specwire:8080"
NUM_TEXTS = 300
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

GENERATE = """
import sys
from specwire import Client, SamplingParams
with Client(sys.argv[1]) as client:
    print(client.generate("def fibonacci(", SamplingParams(max_tokens=16, seed=1)).text)
"""
FINISHED = """
import json, sys
from specwire import Client
found = []
for address in sys.argv[1:]:
    with Client(address) as client:
        found.append(client.get_status().num_finished)
print(json.dumps(found))
"""


@contextlib.contextmanager
def deployed(cluster: Cluster, manifests: str, *more: str) -> Iterator[None]:
    """An overlay, ready; nothing of it is left afterwards."""
    try:
        for each in (manifests, *more):
            cluster.apply(each)
        cluster.wait_ready()
        yield
    finally:
        cluster.delete()


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_api_server_takes_it(cluster: Cluster, name: str, tmp_path: Path) -> None:
    """But for objects of operators that are not installed."""
    items = list(yaml.safe_load_all(cluster.render(tmp_path, name)))
    (namespace,) = [item for item in items if item["kind"] == "Namespace"]
    groups = {_group(version) for version in cluster.kubectl("api-versions").split()}
    kinds = [item for item in items if _group(item["apiVersion"]) in groups]
    cluster.apply(json.dumps(namespace))
    try:
        cluster.apply(yaml.safe_dump_all(kinds), "--dry-run=server")
    finally:
        cluster.delete()


def _group(api_version: str) -> str:
    return api_version.rpartition("/")[0]


class TestLocal:
    """One of each."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def overlay(cls, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with deployed(cluster, cluster.render(tmp_path_factory.mktemp("local"), "local")):
            yield

    def test_first_text(self, cluster: Cluster) -> None:
        assert cluster.friend(GENERATE, ONE_ADDRESS) == cluster.friend(GENERATE, COORDINATOR) != ""

    def test_only_what_is_documented_may_connect(self, cluster: Cluster) -> None:
        coordinator, draft, verify = (
            cluster.address(name, port)
            for name, port in (("coordinator", 7070), ("draft", 7071), ("verify", 7072))
        )
        if cluster.connects(CLIENTS, "stranger", coordinator):
            pytest.skip("the cluster's network plugin does not enforce NetworkPolicies")
        pod_of_draft = cluster.pods("draft")[0]["metadata"]["name"]
        assert cluster.connects(CLIENTS, "friend", coordinator)
        assert not cluster.connects(CLIENTS, "friend", draft)
        assert not cluster.connects(CLIENTS, "friend", verify)
        assert not cluster.connects(NAMESPACE, pod_of_draft, verify)
        api = json.loads(cluster.kubectl("-n", "default", "get", "service", "kubernetes", "-o", "json"))
        assert not cluster.connects(NAMESPACE, pod_of_draft, f"{api['spec']['clusterIP']}:443")

    @pytest.mark.parametrize("component", ["verify", "draft"])
    def test_the_only_one_is_killed_and_no_text_is_lost(self, cluster: Cluster, component: str) -> None:
        with cluster.loaded("sdk", COORDINATOR) as load:
            time.sleep(2)
            cluster.kill(component)
            cluster.wait_ready(component)
            time.sleep(2)
        load.check()

    def test_a_restart_of_each_fails_no_request(self, cluster: Cluster) -> None:
        with cluster.loaded("sdk", ONE_ADDRESS, num_tokens=24) as load:
            began_s = time.monotonic()
            for name in SERVICES:
                cluster.restart(name)
            time.sleep(max(0.0, began_s + 60.0 - time.monotonic()))
        load.check(at_least=NUM_TEXTS)

    def test_a_coordinator_that_ends_refuses_no_call(self, cluster: Cluster) -> None:
        """Over one connection, and without a second attempt."""
        with cluster.loaded("once", ONE_ADDRESS, num_tokens=24) as load:
            cluster.restart("coordinator")
        load.check(at_least=NUM_TEXTS)

    def test_a_coordinator_that_waits_for_verify_ends_at_once(self, cluster: Cluster) -> None:
        cluster.scale(0, "verify")
        (old,) = cluster.pods("coordinator")
        cluster.kubectl("-n", NAMESPACE, "delete", "pod", old["metadata"]["name"], "--wait=false")
        new = None
        ends_s = time.monotonic() + 60
        while new is None:
            assert time.monotonic() < ends_s, "no other coordinator starts"
            time.sleep(0.5)
            new = next((pod for pod in cluster.pods("coordinator") if _waits(pod, old)), None)
        time.sleep(2)
        began_s = time.monotonic()
        cluster.kubectl("-n", NAMESPACE, "delete", "pod", new["metadata"]["name"], timeout_s=180.0)
        assert time.monotonic() - began_s < 37, "the 22 s of preStop, a second, and what the kubelet takes"
        cluster.scale(1, "verify")
        cluster.wait_ready()


def _waits(pod: Any, old: Any) -> bool:
    statuses = pod["status"].get("containerStatuses", [])
    is_started = any("running" in each["state"] for each in statuses)
    return bool(pod["metadata"]["uid"] != old["metadata"]["uid"] and is_started)


class TestTwoOfEach:
    """`local` with two replicas."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def overlay(cls, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with deployed(cluster, cluster.render(tmp_path_factory.mktemp("local"), "local")):
            cluster.scale(2, *SERVICES)
            yield

    def test_one_client_uses_both_coordinators(self, cluster: Cluster) -> None:
        with cluster.loaded("sdk", COORDINATOR, num_streams=8) as load:
            time.sleep(10)
        load.check()
        addresses = [f"{pod['status']['podIP']}:7070" for pod in cluster.pods("coordinator")]
        one, other = json.loads(cluster.friend(FINISHED, *addresses))
        assert 0.5 < one / other < 2

    def test_kills_and_restarts_fail_no_request(self, cluster: Cluster) -> None:
        with cluster.loaded("sdk", COORDINATOR, num_tokens=24) as load:
            for name in SERVICES:
                cluster.kill(name)
                cluster.wait_ready(name)
            for name in SERVICES:
                cluster.restart(name)
        load.check(at_least=NUM_TEXTS)
        assert load.longest_pause_s < 20


class TestHttp:
    """The front, under OpenAI's own client without retries; with observability."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def overlay(cls, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        manifests = cluster.render(tmp_path_factory.mktemp("http"), "http", ["observability"])
        with deployed(cluster, manifests):
            cluster.bring_openai()
            yield

    def test_a_trace_is_one_tree(self, cluster: Cluster) -> None:
        with cluster.loaded("openai", FRONT, num_streams=1):
            pass
        with forwarded("jaeger", 16686) as address:
            spans = _spans(address, "specwire-http", "POST /v1/completions")
        by_id = {span["spanID"]: span for span in spans}
        (root,) = [span for span in spans if not _parent(span)]
        assert root["operationName"] == "POST /v1/completions"
        assert {"generate", "round", "verify", "verify.serve"} <= {span["operationName"] for span in spans}
        for span in spans:
            if parent := _parent(span):
                outer = by_id[parent]  # a KeyError here is an orphan
                late_us = _end(span) - _end(outer)
                assert late_us < 5_000 or _tag(outer, "specwire.awaited") is False, (span, outer)
            for link in (each["spanID"] for each in span["references"] if each["refType"] != "CHILD_OF"):
                assert by_id[link]["operationName"] == "draft.prepare"
        (generation,) = [span for span in spans if span["operationName"] == "generate"]
        stages = [
            float(tag["value"]) for tag in generation["tags"] if tag["key"].startswith("specwire.stage.")
        ]
        assert sum(stages) == pytest.approx(generation["duration"] / 1e3, abs=2.0)

    def test_prometheus_has_the_metrics_of_all(self, cluster: Cluster) -> None:
        query = urllib.parse.quote("count by (component) (up == 1)")
        found: set[str] = set()
        ends_s = time.monotonic() + 60
        with forwarded("prometheus", 9090) as address:
            while found != {*SERVICES, "http"}:
                assert time.monotonic() < ends_s, found
                time.sleep(1)
                with urllib.request.urlopen(
                    f"http://{address}/api/v1/query?query={query}", timeout=30
                ) as answer:
                    found = {each["metric"]["component"] for each in json.load(answer)["data"]["result"]}

    def test_restarts_fail_no_request(self, cluster: Cluster) -> None:
        with cluster.loaded("openai", FRONT, num_tokens=24) as load:
            for name in (*SERVICES, "http"):
                cluster.restart(name)
        load.check(at_least=NUM_TEXTS)


def _spans(address: str, service: str, operation: str) -> list[Any]:
    """Of the newest trace of an operation, by Jaeger's API, when all of it has arrived."""
    query = f"service={service}&operation={operation.replace(' ', '%20')}&limit=1&lookback=1h"
    ends_s = time.monotonic() + 60
    num_before = -1
    while True:
        with urllib.request.urlopen(f"http://{address}/api/traces?{query}", timeout=30) as answer:
            traces = json.load(answer)["data"]
        spans: list[Any] = traces[0]["spans"] if traces else []
        if spans and len(spans) == num_before:
            return spans
        assert time.monotonic() < ends_s, "no trace arrives"
        num_before = len(spans)
        time.sleep(6)  # longer than exporters wait


def _parent(span: Any) -> str:
    return next((each["spanID"] for each in span["references"] if each["refType"] == "CHILD_OF"), "")


def _end(span: Any) -> int:
    return int(span["startTime"] + span["duration"])


def _tag(span: Any, key: str) -> Any:
    return next((tag["value"] for tag in span["tags"] if tag["key"] == key), None)


SECURELY = """
import json, sys
from specwire import Client, SamplingParams, SpecwireError
from specwire import TLS
address, token = sys.argv[1:]
def status(**options):
    try:
        with Client(address, **options) as client:
            return "text" if client.generate("def f(", SamplingParams(max_tokens=4)).text else "empty"
    except SpecwireError as error:
        return error.status
tls = TLS(ca="/tmp/ca.crt")
print(json.dumps([status(tls=tls, token=token), status(tls=tls), status()]))
"""


class TestSecure:
    """TLS everywhere, and tokens."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def token(cls, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        directory = tmp_path_factory.mktemp("secure")
        authority = Authority(directory / "ca")
        token, line = make_token("alice")
        secrets = [_secret("tokens", {"tokens": line + "\n"})]
        hosts = {"draft": "specwire-peer", "verify": "specwire-peer", "coordinator": "coordinator.specwire"}
        for name, host in hosts.items():
            pair = authority.pair(name, host)
            files = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": authority.path}
            texts = {key: Path(path).read_text() for key, path in files.items()}
            secrets.append(_secret(f"{name}-tls", texts))
        manifests = cluster.render(directory, "secure")
        namespace = json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        cluster.apply(namespace)
        with deployed(cluster, "\n---\n".join(secrets), manifests):
            bring = "import sys; open('/tmp/ca.crt', 'w').write(sys.argv[1])"
            cluster.friend(bring, Path(authority.path).read_text())
            yield token

    def test_who_has_no_token_or_no_tls_is_refused(self, cluster: Cluster, token: str) -> None:
        found = json.loads(cluster.friend(SECURELY, ONE_ADDRESS, token))
        assert found == ["text", "UNAUTHENTICATED", "UNAVAILABLE"]


def _secret(name: str, texts: dict[str, str]) -> str:
    metadata = {"name": name, "namespace": NAMESPACE}
    return json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": texts})


def test_the_scaler_looks_at_the_busiest_coordinator(cluster: Cluster, tmp_path: Path) -> None:
    """With Prometheus and an adapter that has the documented rules, and asks prometheus.specwire:9090."""
    raw = [kubectl(), "get", "--raw", "/apis/custom.metrics.k8s.io/v1beta1"]
    if subprocess.run(raw, capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("the cluster has no custom metrics API")
    manifests = cluster.render(tmp_path, "local", ["observability", "autoscaling"])
    with deployed(cluster, manifests):
        cluster.scale(2, "coordinator")
        addresses = [f"{pod['status']['podIP']}:7070" for pod in cluster.pods("coordinator")]
        with cluster.loaded("sdk", COORDINATOR, num_streams=400) as load:
            ends_s = time.monotonic() + 240
            while (status := cluster.get("hpa", "coordinator")["status"]).get("desiredReplicas", 0) <= 2:
                assert time.monotonic() < ends_s, f"the autoscaler does not act: {status}"
                time.sleep(5)
        one, other = json.loads(cluster.friend(FINISHED, *addresses))
    load.check()
    assert 0.5 < one / other < 2
