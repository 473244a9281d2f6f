"""What must hold of our manifests. Each rule tells its problems; none are good manifests."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

from coordinator import metrics as coordinator_metrics
from draft_service import learner
from specwire.cli import main as cli
from specwire.config import client as client_config
from specwire.config import services as config
from specwire.config.environment import ALL_CONFIGS
from specwire.config.flags import env_name, flag_name, read_config, unknown_variables
from specwire.config.parser import add_flags
from specwire.engine import metrics as engine_metrics
from specwire.errors import ConfigError
from specwire.rpc.server import CONNECTION_AGE_MS
from specwire.telemetry.metrics import Metric
from specwire.v1 import draft_pb2, generation_pb2, verify_pb2
from tests.support.custom_schemas import CUSTOM
from tests.support.manifests import COMPONENT, ROOT, Manifests, Object, Pod, may_connect, named_port

kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
"""Read once, and not for every object."""
NEWEST_KUBERNETES = kubernetes_validate.latest_version()
DNS = "dns:///"
OLDEST_KUBERNETES = "1.30"
"""The first one with `preStop.sleep` switched on."""
ROLES: dict[str, type[Any]] = {
    "draft": config.DraftConfig,
    "verify": config.VerifyConfig,
    "coordinator": config.CoordinatorConfig,
    "http": client_config.HttpConfig,
}
HEALTH_SERVICES = {
    "draft": draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    "verify": verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name,
    "coordinator": generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
}
METRICS: dict[str, Sequence[Metric[Any]]] = {
    "draft": (*engine_metrics.TABLE, *learner.TABLE),
    "verify": engine_metrics.TABLE,
    "coordinator": coordinator_metrics.TABLE,
}
ADDRESSES = ("verify_address", "draft_address", "ray_address", "server")
"""Fields with the address of a peer."""
OTHERS_VARIABLES = {"HOME", "HF_HUB_OFFLINE", "PROMETHEUS_MULTIPROC_DIR"}
OTHERS_VARIABLES |= {"RAY_USAGE_STATS_ENABLED", "RAY_NUM_GPUS", "TARGET", "DRAFT", "HF_TOKEN", "VLLM_HOST_IP"}
"""Of Python's libraries and of scripts; the rest is ours, or OpenTelemetry's, as
specwire/telemetry/tracing.py reads it."""
NOT_OURS = {"specwire-client", "specwire-observer"}
"""Labels that pods of others carry to be let in."""
SHUTDOWN_MARGIN_S = 5
ADDRESS_S = 5
"""For which names and proxies know the address of a pod that ends; twice as long on a busy node."""
_LONGEST_AGE_S = 1.1 * CONNECTION_AGE_MS / 1e3

Rule = Callable[[Manifests], Iterator[str]]


def problems(manifests: Manifests) -> list[str]:
    """Of all rules."""
    return [problem for rule in RULES for problem in rule(manifests)]


# --- schemas --------------------------------------------------------------------------------------


def schema(manifests: Manifests) -> Iterator[str]:
    """The API server would take it: no field is misspelt, missing or of another type."""
    for item in manifests.objects:
        parts = [item] if item["kind"] not in CUSTOM else list(_templates(item["spec"]))
        for part in parts:
            for version in (OLDEST_KUBERNETES, NEWEST_KUBERNETES):
                if problem := _schema_problem(json.dumps(part), version):
                    yield f"{_name(item)}: {problem} (Kubernetes {version})"
        for error in jsonschema.Draft202012Validator(CUSTOM.get(item["kind"], {})).iter_errors(item):
            yield f"{_name(item)}: {error.json_path} {error.message}"


@functools.cache
def _schema_problem(item: str, version: str) -> str:
    """Kept, since the overlays have most of their objects in common."""
    try:
        kubernetes_validate.validate(json.loads(item), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{error.json_path} {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return str(error.message)
    return ""


def _templates(value: Any) -> Iterator[Object]:
    """Of pods, wherever an object of another project's kind has them."""
    for key, entry in _entries(value):
        if key.lower().endswith("template") and "spec" in entry:
            named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "of-a-group"}}
            yield {**named, "template": entry}


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in an object, at any depth, and what it is called there."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        yield str(key), entry
        if isinstance(entry, dict | list):
            yield from _entries(entry)


def _name(item: Object) -> str:
    return f"{item['kind']} {item['metadata']['name']}"


# --- what the processes are told ------------------------------------------------------------------


def role_of(pod: Pod) -> str:
    """The subcommand of `specwire` that the pod runs."""
    return str(pod.container["args"][0])


def settings(pod: Pod) -> Any:
    """The configuration that the process would start with.

    Raises:
        ConfigError: or it would not start.
    """
    kind = ROLES[role_of(pod)]
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_flags(parser, kind)
    args, unknown = parser.parse_known_args(pod.container["args"][1:])
    if unknown:
        raise ConfigError(f"unknown flags {' '.join(unknown)}")
    environ = {name: _filled_in(value) for name, value in pod.environ.items()}
    if strange := unknown_variables(ALL_CONFIGS, environ):
        raise ConfigError(f"unknown variables {' '.join(strange)}")
    return read_config(kind, args, environ)


def _filled_in(value: Any) -> str:
    """A value as the process sees it; files that will be mounted are stood in for by one that is there."""
    text = value if isinstance(value, str) else "1"
    return str(Path(__file__)) if text.startswith("/etc/specwire/") else text


def _started(manifests: Manifests) -> Iterator[tuple[Pod, Any]]:
    """Our processes and their configurations; those that would not start are `configuration`'s to tell."""
    for pod in manifests.services_pods:
        with contextlib.suppress(ConfigError, argparse.ArgumentError, KeyError):
            yield pod, settings(pod)


def configuration(manifests: Manifests) -> Iterator[str]:
    """Every process starts: flags and variables exist, are its own, and their values are good."""
    for pod in manifests.services_pods:
        if ":" not in pod.container["image"]:
            yield f"{pod.owner}: its image has no tag"
        if role_of(pod) not in ROLES:
            yield f"{pod.owner}: specwire has no service {role_of(pod)}"
            continue
        try:
            settings(pod)
        except (ConfigError, argparse.ArgumentError) as error:
            yield f"{pod.owner}: {error}"
        yield from _useless_variables(pod)


def _useless_variables(pod: Pod) -> Iterator[str]:
    names = [field.name for field in dataclasses.fields(ROLES[role_of(pod)])]
    flags = {arg.partition("=")[0] for arg in pod.container["args"]}
    for name in pod.environ:
        if name.startswith("SPECWIRE_") and name not in map(env_name, names):
            yield f"{pod.owner}: {name} is not read by specwire {role_of(pod)}"
    for name in names:
        if flag_name(name) in flags and env_name(name) in pod.environ:
            yield f"{pod.owner}: {flag_name(name)} hides {env_name(name)}"


def variables(manifests: Manifests) -> Iterator[str]:
    """Every variable has a reader, and those it refers to come before it."""
    tracing = "".join(path.read_text() for path in (ROOT / "specwire/telemetry").glob("*.py"))
    for pod in manifests.pods:
        known: set[str] = set()
        used = set(re.findall(r"\$\((\w+)\)", " ".join(str(value) for value in pod.environ.values())))
        for entry in pod.env:
            name = entry["name"]
            ours = name.startswith("SPECWIRE_") or name in OTHERS_VARIABLES | used
            if not ours and not (name.startswith("OTEL_") and re.search(rf"\b{name}\b", tracing)):
                yield f"{pod.owner}: nothing reads the variable {name}"
            for other in re.findall(r"\$\((\w+)\)", str(entry.get("value", ""))):
                if other not in known:
                    yield f"{pod.owner}: {name} is made of {other}, which does not come before it"
            known.add(name)


# --- who reaches whom -----------------------------------------------------------------------------


def ports(manifests: Manifests) -> Iterator[str]:
    """Flags, container ports, Services and policies speak of the same ports."""
    for pod, values in _started(manifests):
        listens = _port_of(values.address)
        name = "http" if role_of(pod) == "http" else "grpc"
        if pod.ports.get(name) != listens:
            yield f"{pod.owner}: listens on {listens}, and its port {name} is {pod.ports.get(name)}"
        shows = _port_of(values.metrics_address) if getattr(values, "metrics_address", "") else None
        if pod.ports.get("metrics") != shows:
            yield f"{pod.owner}: shows metrics at {shows}, and its port metrics is {pod.ports.get('metrics')}"
    for name, service in manifests.of("Service").items():
        for entry in service["spec"]["ports"]:
            for pod in manifests.selected(service["spec"]["selector"]):
                if named_port(pod, entry["targetPort"]) != entry["port"]:
                    yield f"Service {name}: port {entry['port']} is not {entry['targetPort']} of {pod.owner}"
    for name, policy in manifests.of("NetworkPolicy").items():
        yield from _policy_ports(manifests, name, policy["spec"])


def pools(manifests: Manifests) -> Iterator[str]:
    """Model servers listen where an InferencePool says."""
    for name, pool in manifests.of("InferencePool").items():
        for number in (entry["number"] for entry in pool["spec"]["targetPorts"]):
            for pod in manifests.selected(pool["spec"]["selector"]):
                if number not in pod.ports.values():
                    yield f"InferencePool {name}: {pod.owner} has no port {number}"


def routes(manifests: Manifests) -> Iterator[str]:
    """A gateway's routes lead to Services' ports, by services that there are."""
    for item in (*manifests.of("GRPCRoute").values(), *manifests.of("HTTPRoute").values()):
        for rule in item["spec"]["rules"]:
            for match in rule.get("matches", ()):
                if match["method"]["service"] not in {*HEALTH_SERVICES.values(), "grpc.health.v1.Health"}:
                    yield f"{_name(item)}: there is no {match['method']['service']}"
            for backend in rule["backendRefs"]:
                if manifests.service_of(f"{backend['name']}:{backend['port']}") is None:
                    yield f"{_name(item)}: {backend['name']}:{backend['port']} is no Service's port"


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _policy_ports(manifests: Manifests, name: str, spec: Object) -> Iterator[str]:
    for way, key in (("ingress", None), ("egress", "to")):
        for rule in spec.get(way, []):
            selectors = [entry.get("podSelector") for entry in rule.get(key, [])] if key else []
            servers = [pod for s in selectors if s for pod in manifests.selected(s)] if key else None
            for pod in manifests.selected(spec["podSelector"]) if servers is None else servers:
                for entry in rule.get("ports", []):
                    if isinstance(entry["port"], str) and named_port(pod, entry["port"]) is None:
                        yield f"NetworkPolicy {name}: {pod.owner} has no port {entry['port']}"


def probes(manifests: Manifests) -> Iterator[str]:
    """Probes ask, where the process listens, for the health of a service that it serves."""
    for pod in manifests.pods:
        served = HEALTH_SERVICES.get(pod.labels[COMPONENT])
        for name, probe in pod.probes.items():
            try:
                port, service = _asked(pod, probe)
            except ConfigError as error:
                yield f"{pod.owner}: {name} cannot be run: {error}"
                continue
            if port not in pod.ports.values():
                yield f"{pod.owner}: {name} asks at {port}, which is none of its ports"
            if service != served:
                yield f"{pod.owner}: {name} asks for {service} and not for {served}"
    for pod in manifests.services_pods:
        for missing in {"startupProbe", "readinessProbe", "livenessProbe"} - pod.probes.keys():
            yield f"{pod.owner}: has no {missing}"


def _asked(pod: Pod, probe: Object) -> tuple[int | None, str | None]:
    """The port that a probe connects to, and the service whose health it asks for."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service")
    for kind in ("httpGet", "tcpSocket"):
        if kind in probe:
            return named_port(pod, probe[kind]["port"]), None
    program, *words = probe["exec"]["command"]
    if program != "specwire":
        raise ConfigError(f"{program} is not specwire")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            args = cli._parser().parse_args([re.sub(r"/etc/specwire/.*", __file__, word) for word in words])
        except SystemExit:
            raise ConfigError(said.getvalue().strip()) from None
    asking = read_config(client_config.ClientConfig, args, {})
    if asking.timeout_s >= probe["timeoutSeconds"]:
        raise ConfigError(f"--timeout-s {asking.timeout_s}: the probe is killed before")
    return _port_of(asking.server), args.service


def reachability(manifests: Manifests) -> Iterator[str]:
    """Whatever a process is told to connect to is a Service's port, and policies let it through."""
    for pod, values in _started(manifests):
        for what, address in _connections(pod, values):
            found = manifests.service_of(address.removeprefix(DNS))
            if found is None:
                yield f"{pod.owner}: {what} {address} is no Service's port"
                continue
            service, entry = found
            if address.startswith(DNS) and service["spec"].get("clusterIP") != "None":
                yield f"{pod.owner}: {what} {address} is to name all replicas, and has one address"
            for server in manifests.selected(service["spec"]["selector"]):
                port = named_port(server, entry["targetPort"])
                if port is None or not may_connect(manifests, pod, server, port):
                    yield f"{pod.owner}: {what} {address} is not allowed to reach {server.owner}"


def encryption(manifests: Manifests) -> Iterator[str]:
    """Both ends of a connection use TLS, or neither."""
    started = list(_started(manifests))
    listens = {pod.labels[COMPONENT]: bool(values.tls_cert) for pod, values in started}
    for pod, values in started:
        calls = bool(getattr(values, "server_tls", None) or getattr(values, "peer_ca", ""))
        for name in ADDRESSES:
            for address in filter(None, getattr(values, name, "").split(",")):
                server = address.removeprefix(DNS).partition(":")[0]
                if listens.get(server, calls) != calls:
                    yield f"{pod.owner}: {flag_name(name)} {address} has TLS at one end only"
        for name, probe in pod.probes.items():
            is_https = probe.get("httpGet", {}).get("scheme") == "HTTPS"
            if "httpGet" in probe and is_https != bool(values.tls_cert):
                yield f"{pod.owner}: {name} has TLS at one end only"


def _connections(pod: Pod, values: Any) -> Iterator[tuple[str, str]]:
    for name in (*ADDRESSES, "metrics_from"):
        for address in filter(None, getattr(values, name, "").split(",")):
            if not address.startswith("127.0.0.1:"):
                yield flag_name(name), address
    endpoint = pod.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint:
        yield "OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.removeprefix("http://")


# --- whether names name something -----------------------------------------------------------------


def selectors(manifests: Manifests) -> Iterator[str]:
    """Every selector chooses pods, and every target is there."""
    for item in manifests.objects:
        for key, selector in _entries(item):
            if key not in ("selector", "podSelector", "labelSelector"):
                continue
            keys = set(selector.get("matchLabels", selector))
            if selector and not keys & NOT_OURS and not manifests.selected(selector):
                yield f"{_name(item)} {key}: {selector} chooses no pod"
    for name, item in manifests.of("Deployment").items():
        spec = item["spec"]
        if not spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items():
            yield f"Deployment {name}: does not choose its own pods"
    for item in (each for each in manifests.objects if "scaleTargetRef" in each.get("spec", {})):
        wanted = item["spec"]["scaleTargetRef"]
        target = manifests.of(wanted.get("kind", "Deployment")).get(wanted["name"])
        if target is None:
            yield f"{_name(item)}: its target is not there"
        elif "replicas" in target["spec"]:
            yield f"{_name(item)}: each apply would reset the number of replicas"


def measures(manifests: Manifests) -> Iterator[str]:
    """Autoscalers look at metrics that their services have, and a scraper collects them."""
    for name, item in manifests.of("HorizontalPodAutoscaler").items():
        shown = {metric.name for metric in METRICS.get(item["spec"]["scaleTargetRef"]["name"], ())}
        for metric in item["spec"]["metrics"]:
            measured = metric[metric["type"].lower()]
            wanted = measured["metric"]["name"]
            if wanted not in shown:
                yield f"HorizontalPodAutoscaler {name}: its target has no metric {wanted}"
            whose = measured.get("describedObject")
            if whose is not None and whose["name"] not in manifests.of(whose["kind"]):
                yield f"HorizontalPodAutoscaler {name}: there is no {whose['kind']} {whose['name']}"

    known = {metric.name for table in METRICS.values() for metric in table}
    for name, item in manifests.of("ScaledObject").items():
        for trigger in (each["metadata"] for each in item["spec"]["triggers"]):
            for metric in set(re.findall(r"\bspecwire_\w+", trigger["query"])) - known:
                yield f"ScaledObject {name}: there is no metric {metric}"
            address = trigger["serverAddress"].removeprefix("http://").replace(".specwire:", ":")
            if manifests.service_of(address) is None:
                yield f"ScaledObject {name}: {address} is no Service's port"


def namespaces(manifests: Manifests) -> Iterator[str]:
    """Everything is in the namespace that the policies lock; so are those to whom rights are given."""
    for item in manifests.objects:
        if item["kind"] != "Namespace" and item["metadata"].get("namespace") not in manifests.of("Namespace"):
            yield f"{_name(item)}: is not in a namespace of ours"
        for subject in item.get("subjects", ()):
            if subject.get("namespace") not in manifests.of("Namespace"):
                yield f"{_name(item)}: gives rights to {subject['name']} of another namespace"


def references(manifests: Manifests) -> Iterator[str]:
    """Every ConfigMap, claim and account is there; a Secret is there, or the page says how it is made."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    for pod in manifests.pods:
        for kind, name in _references(pod.spec):
            told = kind == "Secret" and f"`{name}`" in page
            if name not in manifests.of(kind) and not told:
                yield f"{pod.owner}: there is no {kind} {name}"
        volumes = [volume["name"] for volume in pod.spec.get("volumes", ())]
        mounts = [mount["name"] for mount in pod.container.get("volumeMounts", ())]
        if sorted(volumes) != sorted(mounts):
            yield f"{pod.owner}: volumes {volumes}, and mounts {mounts}"
        for name, value in pod.environ.items():
            if isinstance(value, str) and value.startswith("/") and pod.mount_of(value) is None:
                yield f"{pod.owner}: {name}={value} lies in no volume"


def _references(spec: Object) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", spec["serviceAccountName"]
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]


# --- time, rights, devices ------------------------------------------------------------------------


def grace(manifests: Manifests) -> Iterator[str]:
    """No pod is killed before its grace is over, and none is restarted while it starts."""
    for pod, values in _started(manifests):
        wait_s = pod.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        needed_s = wait_s + values.grace_s + SHUTDOWN_MARGIN_S
        if pod.spec["terminationGracePeriodSeconds"] < needed_s:
            yield f"{pod.owner}: is killed before {needed_s:g} s, which preStop and --grace-s may take"
        connected_s = 2 * ADDRESS_S + _LONGEST_AGE_S if role_of(pod) == "coordinator" else ADDRESS_S
        if wait_s < connected_s:
            yield f"{pod.owner}: has clients for {connected_s:g} s, and preStop waits for {wait_s}"
        startup = pod.container["startupProbe"]
        budget_s = startup["periodSeconds"] * startup["failureThreshold"]
        if budget_s < _longest_start_s(values):
            yield f"{pod.owner}: may take {_longest_start_s(values):g} s to start, and gets {budget_s}"


def _longest_start_s(values: Any) -> float:
    """As far as flags bound it; loading a model on one device is bounded by nothing but the probe."""
    if isinstance(values, config.CoordinatorConfig):
        return values.connect_timeout_s
    return 2 * float(values.load_timeout_s) if getattr(values, "tensor_parallel_size", 1) > 1 else 0.0


def rights(manifests: Manifests) -> Iterator[str]:
    """Pods have none, and know nothing of the API server unless it is what they are for."""
    for pod in manifests.pods:
        mine, its = pod.spec.get("securityContext", {}), pod.container.get("securityContext", {})
        good = {
            "runs as root": mine.get("runAsNonRoot") is True and mine.get("runAsUser", 0) > 0,
            "no seccomp": mine.get("seccompProfile") == {"type": "RuntimeDefault"},
            "can write to its file system": its.get("readOnlyRootFilesystem") is True,
            "can become more": its.get("allowPrivilegeEscalation") is False,
            "keeps capabilities": its.get("capabilities") == {"drop": ["ALL"]},
            "links to services": pod.spec.get("enableServiceLinks") is False,
            "no memory limit": "memory" in pod.container["resources"].get("limits", {}),
            "no requests": {"cpu", "memory"} <= pod.container["resources"].get("requests", {}).keys(),
            "has more rights at first": all(
                each["securityContext"] == its for each in pod.spec.get("initContainers", ())
            ),
            "is given a token": pod.spec.get("automountServiceAccountToken") is False
            or pod.labels[COMPONENT] == "prometheus",
        }
        yield from (f"{pod.owner}: {problem}" for problem, holds in good.items() if not holds)
    for name, account in manifests.of("ServiceAccount").items():
        if account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {name}: hands out tokens"


_RAY = ("verify", "ray-head", "ray-worker")
MAY_REACH = {
    "draft": ("coordinator",),
    "ray-head": _RAY,
    "ray-worker": _RAY,
    "verify": ("coordinator", *_RAY),
}
"""Who may connect to whom."""


def isolation(manifests: Manifests) -> Iterator[str]:
    """Draft and verify are reachable by the coordinator alone, and Ray by verify alone."""
    for server in (pod for pod in manifests.pods if pod.labels[COMPONENT] in MAY_REACH):
        allowed = MAY_REACH[server.labels[COMPONENT]]
        for client in (pod for pod in manifests.pods if pod.labels[COMPONENT] not in allowed):
            for port in (number for name, number in server.ports.items() if name != "metrics"):
                if may_connect(manifests, client, server, port):
                    yield f"{client.owner}: can reach {server.owner} at {port}"


def devices(manifests: Manifests) -> Iterator[str]:
    """The Ray cluster has the GPUs that verify wants, runs the same image, and the version it is told."""
    locked = (ROOT / "requirements/image.txt").read_text()
    versions = dict(re.findall(r"^(\S+)==(\S+)", locked, re.MULTILINE))
    for pod, values in _started(manifests):
        if not getattr(values, "ray_address", ""):
            continue
        ray = [pod for pod in manifests.pods if pod.owner.startswith(("RayCluster", "LeaderWorkerSet"))]
        found = sum(other.replicas * _num_gpus(other) for other in ray)
        wanted = pod.replicas * values.tensor_parallel_size
        if found < wanted:
            yield f"{pod.owner}: wants {wanted} GPUs, and the Ray cluster has {found}"
        for other in ray:
            if other.container["image"] != pod.container["image"]:
                yield f"{other.owner}: image {other.container['image']} is not that of {pod.owner}"
    for name, cluster in manifests.of("RayCluster").items():
        if cluster["spec"]["rayVersion"] != versions["ray"]:
            yield f"RayCluster {name}: rayVersion {cluster['spec']['rayVersion']} is not {versions['ray']}"
        for group in cluster["spec"]["workerGroupSpecs"]:
            pod = next(other for other in manifests.pods if other.owner.endswith(group["groupName"]))
            if group["rayStartParams"]["num-gpus"] != str(_num_gpus(pod)):
                yield f"{pod.owner}: num-gpus is not its limit of GPUs"


def _num_gpus(pod: Pod) -> int:
    return int(pod.container["resources"]["limits"].get("nvidia.com/gpu", 0))


RULES: tuple[Rule, ...] = (
    schema,
    configuration,
    variables,
    ports,
    pools,
    routes,
    probes,
    reachability,
    encryption,
    selectors,
    measures,
    namespaces,
    references,
    grace,
    rights,
    isolation,
    devices,
)
