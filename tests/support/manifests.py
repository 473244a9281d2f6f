"""Kubernetes manifests as kustomize renders them, and what can be looked up in them. No cluster is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMPONENT = "app.kubernetes.io/component"

Object = dict[str, Any]


def kubectl() -> str:
    """The program, as `make setup` installs it, or the machine's; without one the test is skipped."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None and os.environ.get("CI") != "true":
        pytest.skip("kubectl is not installed: `make setup` brings it on Linux")
    assert found is not None, "CI has to have kubectl"
    return found


def render(directory: Path) -> list[Object]:
    """What `kubectl apply -k` would send."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def compose(directory: Path, overlay: str, components: Sequence[str], **further: Any) -> None:
    """Write a kustomization of an overlay with further components, and with what else it says."""
    resource, *others = (
        os.path.relpath(K8S / path, directory)
        for path in (f"overlays/{overlay}", *(f"components/{name}" for name in components))
    )
    kustomization = {"resources": [resource], "components": others, **further}
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))


def composed(directory: Path, overlay: str, components: Sequence[str]) -> list[Object]:
    """What an overlay with further components comes to."""
    compose(directory, overlay, components)
    return render(directory)


@dataclass(frozen=True)
class Pod:
    """What a controller makes pods from."""

    owner: str
    """Kind and name of the controller, for messages."""
    replicas: int
    labels: Mapping[str, str]
    spec: Object

    @property
    def container(self) -> Object:
        """Our pods have one."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def environ(self) -> dict[str, Any]:
        """Values by name; those that are filled in by Kubernetes as their `valueFrom`."""
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in self.env}

    @property
    def env(self) -> list[Object]:
        return list(self.container.get("env", ()))

    @property
    def ports(self) -> dict[str, int]:
        """Container ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}

    @property
    def probes(self) -> dict[str, Object]:
        names = ("startupProbe", "readinessProbe", "livenessProbe")
        return {name: self.container[name] for name in names if name in self.container}

    def mount_of(self, path: str) -> Object | None:
        """The volume that a path of the container lies in."""
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", ())}
        for mount in self.container.get("volumeMounts", ()):
            if Path(path).is_relative_to(mount["mountPath"]):
                return volumes.get(mount["name"])
        return None


class Manifests:
    """All objects of an overlay."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    def of(self, kind: str) -> dict[str, Object]:
        """All of a kind by their names."""
        return {item["metadata"]["name"]: item for item in self.objects if item["kind"] == kind}

    @property
    def pods(self) -> list[Pod]:
        return [*self._deployed(), *self._led(), *self._ray()]

    @property
    def services_pods(self) -> list[Pod]:
        """Those that run `specwire`."""
        return [
            pod
            for pod in (*self._deployed(), *self._led())
            if (pod.container["name"], pod.container["image"].partition(":")[0]) == ("specwire", "specwire")
        ]

    def _deployed(self) -> Iterator[Pod]:
        for kind in ("Deployment", "Job"):
            for name, item in self.of(kind).items():
                spec = item["spec"]
                labels = spec["template"]["metadata"]["labels"]
                yield Pod(f"{kind} {name}", spec.get("replicas", 1), labels, spec["template"]["spec"])

    def _led(self) -> Iterator[Pod]:
        for name, item in self.of("LeaderWorkerSet").items():
            replicas, group = item["spec"]["replicas"], item["spec"]["leaderWorkerTemplate"]
            for role, num in (("leader", replicas), ("worker", replicas * (group["size"] - 1))):
                template = group[f"{role}Template"]
                where = f"LeaderWorkerSet {name} {role}"
                yield Pod(where, num, template["metadata"]["labels"], template["spec"])

    def _ray(self) -> Iterator[Pod]:
        for name, item in self.of("RayCluster").items():
            spec = item["spec"]
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                where = f"RayCluster {name} {group.get('groupName', 'head')}"
                template = group["template"]
                yield Pod(where, group.get("replicas", 1), template["metadata"]["labels"], template["spec"])

    def selected(self, selector: Object) -> list[Pod]:
        """Pods that a label selector, or a Service's plain mapping, chooses."""
        return [pod for pod in self.pods if matches(selector, pod.labels)]

    def service_of(self, address: str) -> tuple[Object, Object] | None:
        """The Service, and its port, that `HOST:PORT` stands for; KubeRay makes one for the head."""
        host, _, port = address.rpartition(":")
        service = self.of("Service").get(host) or self._head_service(host)
        if service is None:
            return None
        return next(
            ((service, entry) for entry in service["spec"]["ports"] if entry["port"] == int(port)), None
        )

    def _head_service(self, host: str) -> Object | None:
        for name, item in self.of("RayCluster").items():
            if host == f"{name}-head-svc":
                template = item["spec"]["headGroupSpec"]["template"]
                (container,) = template["spec"]["containers"]
                ports = [{"port": p["containerPort"], "targetPort": p["name"]} for p in container["ports"]]
                selector = {COMPONENT: template["metadata"]["labels"][COMPONENT]}
                return {"spec": {"selector": selector, "ports": ports}}
        return None


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a selector chooses these labels."""
    wanted = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", [])
    if not wanted and not expressions:
        wanted = selector
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(expression, labels) for expression in expressions
    )


def _holds(expression: Object, labels: Mapping[str, str]) -> bool:
    if expression["operator"] != "In":
        raise NotImplementedError(expression["operator"])
    return labels.get(expression["key"]) in expression["values"]


def named_port(pod: Pod, port: str | int) -> int | None:
    """The number of a container's port, by its name or itself."""
    return pod.ports.get(port) if isinstance(port, str) else port


def may_connect(manifests: Manifests, client: Pod, server: Pod, port: int) -> bool:
    """Whether the NetworkPolicies let a pod of the namespace reach another one's TCP port."""
    policies = [item["spec"] for item in manifests.of("NetworkPolicy").values()]
    return _lets(policies, "Egress", client, server, server, port) and _lets(
        policies, "Ingress", server, client, server, port
    )


def _lets(policies: list[Object], way: str, owner: Pod, peer: Pod, server: Pod, port: int) -> bool:
    """One end's consent: without any policy for it, it consents to all."""
    mine = [p for p in policies if way in p["policyTypes"] and matches(p["podSelector"], owner.labels)]
    key = "to" if way == "Egress" else "from"
    rules = [rule for policy in mine for rule in policy.get(way.lower(), [])]
    return not mine or any(
        _names_peer(rule.get(key), peer) and _names_port(rule, server, port) for rule in rules
    )


def _names_peer(peers: list[Object] | None, peer: Pod) -> bool:
    """Namespaces are known by name only, and all of ours is in one."""
    if peers is None:
        return True
    return any(
        matches(entry.get("podSelector", {}), peer.labels)
        for entry in peers
        if not entry.get("namespaceSelector")
    )


def _names_port(rule: Object, server: Pod, port: int) -> bool:
    entries = rule.get("ports")
    if entries is None:
        return True
    tcp = (entry for entry in entries if entry.get("protocol", "TCP") == "TCP")
    return any(named_port(server, entry["port"]) == port for entry in tcp)
