"""The manifests of k8s/, as kustomize renders them: the API server takes them, and they fit the code."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from specwire.cli import main as cli
from specwire.vllm import read_options
from tests.support import manifest_rules
from tests.support.manifest_rules import HEALTH_SERVICES, ROLES, problems, settings
from tests.support.manifests import (
    COMPONENT,
    K8S,
    OVERLAYS,
    ROOT,
    Manifests,
    Object,
    composed,
    may_connect,
    render,
)

COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())

at = functools.cache(lambda path: Manifests(render(K8S / path)))
rendered = functools.cache(lambda name: at(f"overlays/{name}"))


@pytest.mark.parametrize("name", OVERLAYS)
class TestOverlay:
    def test_has_no_problems(self, name: str) -> None:
        assert problems(rendered(name)) == []

    def test_runs_every_service_with_all_that_belongs_to_it(self, name: str) -> None:
        """And denies what no policy allows."""
        manifests = rendered(name)
        assert HEALTH_SERVICES.keys() <= {pod.labels[COMPONENT] for pod in manifests.services_pods}
        for kind in ("Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"):
            assert HEALTH_SERVICES.keys() <= manifests.of(kind).keys(), kind
        policy = manifests.of("NetworkPolicy")["default-deny"]["spec"]
        assert policy == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
        assert f"k8s/overlays/{name}" in (ROOT / "docs/kubernetes.md").read_text()


@pytest.mark.parametrize("name", ["vllm", "vllm-nodes"])
def test_vllm_in_place_of_verify_and_coordinator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pods are checked as foreign ones are, and what they are told of drafts as the plug-in reads it."""
    manifests = at(name)
    monkeypatch.setitem(manifest_rules.MAY_REACH, "draft", ("vllm",))
    assert problems(manifests) == []
    pods = [pod for pod in manifests.pods if pod.labels[COMPONENT].startswith("vllm")]
    assert len(pods) == 1 + name.endswith("nodes")
    for pod in pods:
        config = read_options({}, {name: str(value) for name, value in pod.environ.items()})
        assert config.draft_address == "dns:///draft.specwire:7071"
        [flag] = [word for word in pod.container["args"] if word.startswith("--speculative-config=")]
        given = json.loads(flag.partition("=")[2])
        module, _, name_of_class = given["model"].rpartition(".")
        assert callable(getattr(importlib.import_module(module), name_of_class))
    [draft] = [other for other in manifests.pods if other.labels[COMPONENT] == "draft"]
    assert may_connect(manifests, pods[0], draft, 7071)
    assert f"k8s/{name}" in (ROOT / "docs/vllm.md").read_text()


def test_ranks_of_vllm_on_every_node_have_the_same_flags() -> None:
    """But for their own places; as many ranks as GPUs."""
    manifests = at("vllm-nodes")
    leader, worker = (pod for pod in manifests.pods if pod.labels[COMPONENT].startswith("vllm"))
    flags, others = ({*pod.container["args"]} for pod in (leader, worker))
    assert flags ^ others == {"--node-rank=0", "--node-rank=$(LWS_WORKER_INDEX)", "--headless"}
    cards = sum(
        pod.replicas * pod.container["resources"]["limits"]["nvidia.com/gpu"] for pod in (leader, worker)
    )
    assert {f"--nnodes={leader.replicas + worker.replicas}", f"--tensor-parallel-size={cards}"} <= flags
    assert may_connect(manifests, worker, leader, 29501)


def test_components_fit_every_overlay(tmp_path: Path) -> None:
    """All at once, with the one that is furthest from the base, which has one of them already."""
    components = [name for name in COMPONENTS if name != "autoscaling"]
    assert problems(Manifests(composed(tmp_path, "gpu", components))) == []


def test_a_second_set_with_another_model_as_the_page_shows(tmp_path: Path) -> None:
    """All of it is in a namespace of its own, and the route stays where it is."""
    shutil.copytree(K8S, tmp_path / "k8s")
    shutil.copytree(ROOT / "docs/grafana", tmp_path / "docs/grafana")
    overlays = tmp_path / "k8s/overlays"
    with (overlays / "mine/kustomization.yaml").open("a") as mine:
        mine.write("components: [../../components/http, ../../parts/gateway]\n")
    (overlays / "next").mkdir()
    page = (ROOT / "docs/kubernetes.md").read_text()
    for name, text in re.findall(r"```yaml\n# overlays/(next/[\w.]+)(.*?)```", page, re.DOTALL):
        (overlays / name).write_text(f"#{text}")
    manifests = Manifests(render(overlays / "next"))
    assert [*manifests.of("Namespace")] == ["specwire-next"]
    spaces = {item["metadata"].get("namespace", "specwire-next") for item in manifests.objects}
    assert spaces == {"specwire-next"}
    assert not manifests.of("HTTPRoute")
    asked = {
        each["metadata"]["serverAddress"]
        for item in manifests.of("ScaledObject").values()
        for each in item["spec"]["triggers"]
    }
    assert asked == {"http://prometheus.specwire-next:9090"}
    (fetched,) = manifests.of("Deployment")["verify"]["spec"]["template"]["spec"]["initContainers"]
    assert {"name": "REPOSITORY", "value": "Qwen/Qwen3-14B"} in fetched["env"]


def test_the_volume_can_be_filled(tmp_path: Path) -> None:
    manifests = Manifests(composed(tmp_path, "gpu", ["../parts/loader"]))
    assert problems(manifests) == []
    (loader,) = (pod for pod in manifests.pods if pod.owner == "Job loader")
    volume = loader.mount_of("/models/target")
    assert volume == {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}


@pytest.mark.sample(3)
@pytest.mark.parametrize("pair", [*itertools.combinations(COMPONENTS, 2)], ids="+".join)
def test_components_fit_each_other(pair: tuple[str, str], tmp_path: Path) -> None:
    assert problems(Manifests(composed(tmp_path, "local", pair))) == []


def test_a_laptop_has_room_for_everything_and_one_pod_more(tmp_path: Path) -> None:
    """Two cores, of which kind's own pods ask for 0.95."""
    components = [name for name in COMPONENTS if name != "autoscaling"]  # which has two of each
    manifests = Manifests(composed(tmp_path, "local", components))
    assert problems(manifests) == []
    asked = [(pod.replicas, _cores(pod.container["resources"]["requests"]["cpu"])) for pod in manifests.pods]
    assert sum(num * cores for num, cores in asked) + max(cores for _, cores in asked) <= 1.05


def _cores(quantity: str) -> float:
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


def test_waits_outlast_the_restart_of_a_container() -> None:
    """With its model: 7 s were seen on two busy cores, and the kubelet waits 10 s before a second restart."""
    for pod in rendered("http").services_pods:
        name = {"coordinator": "failover_timeout_s", "http": "patience_s"}.get(pod.labels[COMPONENT])
        assert name is None or getattr(settings(pod), name) >= 30.0


def test_every_service_is_asked_for_its_own_health() -> None:
    assert HEALTH_SERVICES.keys() == ROLES.keys() - {"http"} == cli._SERVICES.keys()


def test_the_coordinator_is_the_way_in() -> None:
    """The rules say who must not get through; here is who must."""
    manifests = rendered("observability")
    by_name = {pod.labels[COMPONENT]: pod for pod in manifests.pods}
    assert may_connect(manifests, by_name["coordinator"], by_name["verify"], 7072)
    assert may_connect(manifests, by_name["coordinator"], by_name["draft"], 7071)
    assert not may_connect(manifests, by_name["draft"], by_name["verify"], 7072)
    assert not may_connect(manifests, by_name["verify"], by_name["coordinator"], 7070)
    (rule,) = manifests.of("NetworkPolicy")["coordinator"]["spec"]["ingress"]
    clients = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"specwire-client": "true"}}}
    assert rule == {"from": [clients], "ports": [{"port": "grpc"}]}


# --- defects that must be found -------------------------------------------------------------------


def put(manifests: Manifests, where: str, value: Any) -> None:
    """Set something to another value, or remove it where that is None.

    Args:
        where: `KIND NAME: PATH`, or `NAME: PATH` in the container of a Deployment, where `PATH` may also be a
            flag of its command line, whose word is replaced as a whole by another flag, or a variable.
    """
    owner, _, path = where.partition(": ")
    kind, _, name = owner.rpartition(" ")
    item: Any = manifests.of(kind)[name] if kind else _container(manifests, name)
    if path.startswith("--"):
        [index] = [i for i, word in enumerate(item["args"]) if word.startswith(f"{path}=")]
        item["args"][index] = value if value.startswith("--") else f"{path}={value}"
    elif path.isupper():
        others = [entry for entry in item["env"] if entry["name"] != path]
        item["env"] = others if value is None else [*others, {"name": path, "value": value}]
    else:
        *parents, last = path.split(".")
        for each in parents:
            item = item[int(each) if each.isdigit() else each]
        if value is None:
            del item[last]
        else:
            item[last] = value


def _container(manifests: Manifests, name: str) -> Object:
    return manifests.of("Deployment")[name]["spec"]["template"]["spec"]["containers"][0]


def policy_without_pods(m: Manifests) -> None:
    m.of("NetworkPolicy")["draft"]["spec"]["podSelector"]["matchLabels"][COMPONENT] = "drafts"


def open_door(m: Manifests) -> None:
    m.of("NetworkPolicy")["verify"]["spec"]["ingress"].append({})
    policy = copy.deepcopy(m.of("NetworkPolicy")["verify"])
    policy["metadata"]["name"] = "out"
    policy["spec"] = {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]}
    m.objects.append(policy)


def variable_too_early(m: Manifests) -> None:
    _container(m, "draft")["env"].sort(key=lambda entry: entry["name"] == "POD_NAME")


def no_config_map(m: Manifests) -> None:
    m.objects.remove(next(item for item in m.objects if item["kind"] == "ConfigMap"))


def probe_with_a_misspelt_flag(m: Manifests) -> None:
    command = _container(m, "verify")["livenessProbe"]["exec"]["command"]
    command[command.index("--server-name=specwire-peer")] = "--servername=specwire-peer"


def untold_secret(m: Manifests) -> None:
    volumes = m.of("Deployment")["coordinator"]["spec"]["template"]["spec"]["volumes"]
    (secret,) = [volume["secret"] for volume in volumes if volume["name"] == "tokens"]
    secret["secretName"] = "bearers"


POD = "spec.template.spec"
SCALER = "HorizontalPodAutoscaler coordinator"
METRIC = f"{SCALER}: spec.metrics.0.object"
GROUP = "LeaderWorkerSet target: spec.leaderWorkerTemplate"
#: Of each overlay: what is put where, or a function that does more, and the problem that must be told.
DEFECTS: dict[str, list[tuple[Any, ...]]] = {
    "local": [
        ("draft: livenessProbe.periodSecond", 5, "'periodSecond' was unexpected"),
        ("verify: --grace-s", "--grace=120", "unknown flags --grace=120"),
        ("verify: --grace-s", "-1", "--grace-s -1.0: must be"),
        ("draft: SPECWIRE_MODELL", "x", "SPECWIRE_MODELL"),
        (
            "coordinator: SPECWIRE_NUM_THREADS",
            "2",
            "SPECWIRE_NUM_THREADS is not read by specwire coordinator",
        ),
        ("draft: SPECWIRE_GRACE_S", "20", "--grace-s hides SPECWIRE_GRACE_S"),
        ("draft: OTEL_EXPORTER_OTLP_ENDPOINTS", "x:1", "nothing reads the variable OTEL_EXPORTER_OTLP_ENDPO"),
        ("draft: --address", "0.0.0.0:7171", "listens on 7171, and its port grpc is 7071"),
        ("draft: readinessProbe.grpc.port", 7072, "readinessProbe asks at 7072"),
        (
            "draft: readinessProbe.grpc.service",
            "Draft",
            "asks for Draft and not for specwire.v1.DraftService",
        ),
        ("coordinator: --verify-address", "x:7072", "--verify-address x:7072 is no Service's port"),
        ("Service verify: spec.clusterIP", None, "is to name all replicas, and has one address"),
        ("Service coordinator: spec.ports.0.port", 7777, "port 7777 is not grpc"),
        (policy_without_pods, "'drafts'}} chooses no pod"),
        (policy_without_pods, "--draft-address dns:///draft:7071 is not allowed to reach Deployment draft"),
        ("NetworkPolicy verify: spec.ingress.0.ports", [{"port": "http"}], "verify has no port http"),
        (open_door, "Deployment draft: can reach Deployment verify at 7072"),
        ("coordinator: lifecycle.preStop.sleep.seconds", 5, "has clients for 21 s, and preStop waits for 5"),
        (f"Deployment coordinator: {POD}.terminationGracePeriodSeconds", 120, "is killed before 147 s"),
        ("coordinator: startupProbe.failureThreshold", 12, "may take 600 s to start, and gets 60"),
        (f"Deployment draft: {POD}.securityContext.runAsUser", 0, "runs as root"),
        ("verify: securityContext.readOnlyRootFilesystem", False, "can write to its file system"),
        ("verify: SPECWIRE_ALLOW_PLAINTEXT", None, "would be plaintext beyond this machine"),
    ],
    "http": [("http: --server", "coordinator:7071", "--server coordinator:7071 is no Service's port")],
    "observability": [
        (variable_too_early, "made of POD_NAME, which does not come before it"),
        (no_config_map, "there is no ConfigMap"),
        ("Deployment jaeger: metadata.namespace", "default", "jaeger: is not in a namespace of ours"),
        (
            "draft: SPECWIRE_METRICS_ADDRESS",
            "[::]:9000",
            "shows metrics at 9000, and its port metrics is 9464",
        ),
    ],
    "gpu": [
        ("HorizontalPodAutoscaler draft: spec.scaleTargetRef.name", "drafts", "its target is not there"),
        (f"{METRIC}.metric.name", "specwire_streams", f"{SCALER}: its target has no metric specwire_streams"),
        (f"{METRIC}.describedObject.name", "coordinators", f"{SCALER}: there is no Service coordinators"),
        ("Deployment draft: spec.replicas", 2, "each apply would reset the number of replicas"),
        ("Deployment verify: spec.replicas", 2, "wants 8 GPUs, and the Ray cluster has 4"),
        ("RayCluster target: spec.rayVersion", "2.9.0", "rayVersion 2.9.0 is not"),
        ("RayCluster target: spec.workerGroupSpecs.0.minReplica", 1, "'minReplica' was unexpected"),
        (f"RayCluster target: spec.headGroupSpec.{POD[5:]}.container", [], "'container' was unexpected"),
    ],
    "lws": [
        (f"{GROUP}.size", 1, "leader: wants 16 GPUs, and the Ray cluster has 8"),
        (f"{GROUP}.sizes", 2, "'sizes' was unexpected"),
        (f"{GROUP}.workerTemplate.spec.restart", "x", "LeaderWorkerSet target: $.template.spec"),
    ],
    "node": [
        ("ScaledObject draft: spec.scaleTargetRef.name", "drafts", "ScaledObject draft: its target is not"),
        ("ScaledObject verify: spec.triggers.1.metadata.query", "max(specwire_kv)", "no metric specwire_kv"),
        (
            f"Deployment verify: {POD}.initContainers.0.securityContext",
            {},
            "verify: has more rights at first",
        ),
    ],
    "inference-pool": [
        ("InferencePool specwire: spec.targetPorts.0.number", 8000, "Deployment http has no port 8000"),
        ("http: SPECWIRE_METRICS_FROM", "coordinator:9465", "coordinator:9465 is no Service's port"),
    ],
    "gateway": [
        ("GRPCRoute coordinator: spec.rules.0.backendRefs.0.port", 7071, "7071 is no Service's port"),
        ("HTTPRoute http: spec.rules.0.timeout", {}, "'timeout' was unexpected"),
        ("GRPCRoute coordinator: spec.rules.0.matches.0.method.service", "v1.X", "there is no v1.X"),
    ],
    "secure": [
        (probe_with_a_misspelt_flag, "unrecognized arguments: --servername"),
        ("verify: readinessProbe.timeoutSeconds", 1, "the probe is killed before"),
        (untold_secret, "there is no Secret bearers"),
        (
            "draft: SPECWIRE_TLS_KEY",
            "/etc/tls/tls.key",
            "SPECWIRE_TLS_KEY=/etc/tls/tls.key lies in no volume",
        ),
    ],
}


CASES = {defect[-1]: (overlay, defect[:-1]) for overlay in DEFECTS for defect in DEFECTS[overlay]}


@pytest.mark.parametrize("message", CASES)
def test_finds(message: str) -> None:
    overlay, change = CASES[message]
    broken = Manifests(copy.deepcopy(rendered(overlay).objects))
    if isinstance(change[0], str):
        put(broken, *change)
    else:
        change[0](broken)
    assert any(message in problem for problem in problems(broken)), problems(broken)


# --- what is beside the manifests -----------------------------------------------------------------


def test_the_way_into_a_ray_cluster_is_good_shell_and_python(tmp_path: Path) -> None:
    script = K8S / "overlays/gpu/join-ray.sh"
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=10)
    _, _, python = script.read_text().partition("<<'WAIT'\n")
    compile(python.partition("\nWAIT\n")[0], str(script), "exec")


def test_jaeger_listens_where_its_service_and_its_probes_say() -> None:
    manifests = rendered("observability")
    config = yaml.safe_load(_files(manifests, "jaeger-")["config.yaml"])
    (pod,) = [pod for pod in manifests.pods if pod.owner == "Deployment jaeger"]
    extensions = config["extensions"]
    listening = {
        "otlp": config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"],
        "page": extensions["jaeger_query"]["http"]["endpoint"],
        "health": extensions["healthcheckv2"]["http"]["endpoint"],
    }
    assert {name: f"0.0.0.0:{port}" for name, port in pod.ports.items()} == listening
    storage = extensions["jaeger_query"]["storage"]["traces"]
    assert storage == config["exporters"]["jaeger_storage_exporter"]["trace_storage"]
    assert storage in extensions["jaeger_storage"]["backends"]
    pipeline = config["service"]["pipelines"]["traces"]
    for part in ("receivers", "processors", "exporters"):
        assert pipeline[part] == list(config[part])
    assert sorted(config["service"]["extensions"]) == sorted(extensions)


def _files(manifests: Manifests, config_map: str) -> dict[str, str]:
    """The files of a generated ConfigMap."""
    (found,) = [
        item["data"] for name, item in manifests.of("ConfigMap").items() if name.startswith(config_map)
    ]
    return dict(found)


def test_prometheus_scrapes_every_service_and_names_pods_as_autoscalers_do() -> None:
    manifests = rendered("observability")
    files = _files(manifests, "prometheus-")
    config = yaml.safe_load(files["prometheus.yml"])
    assert files.keys() == {"prometheus.yml", *config["rule_files"]}
    (job,) = config["scrape_configs"]
    (keep,) = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    assert keep["source_labels"] == ["__meta_kubernetes_pod_container_port_name"]
    (prometheus,) = [pod for pod in manifests.pods if pod.labels[COMPONENT] == "prometheus"]
    for pod in manifests.services_pods:
        (port,) = [number for name, number in pod.ports.items() if re.fullmatch(keep["regex"], name)]
        assert may_connect(manifests, prometheus, pod, port)
    targets = {rule["target_label"] for rule in job["relabel_configs"] if "target_label" in rule}
    assert {"namespace", "pod"} <= targets
    (sd,) = job["kubernetes_sd_configs"]
    assert sd == {"role": "pod", "namespaces": {"own_namespace": True}}
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]} in manifests.of(
        "Role"
    )["prometheus"]["rules"]


def test_spans_say_which_container_made_them_and_where() -> None:
    for pod in rendered("observability").services_pods:
        pairs = str(pod.environ["OTEL_RESOURCE_ATTRIBUTES"]).split(",")
        names = {pair.partition("=")[0] for pair in pairs}
        assert names == {f"k8s.{part}.name" for part in ("namespace", "node", "pod", "container")}, pod.owner


def test_the_dashboard_is_there_for_grafana() -> None:
    (found,) = [
        m for m in rendered("observability").of("ConfigMap").values() if "dashboard" in m["metadata"]["name"]
    ]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["specwire.json"])["panels"]


# --- the image ------------------------------------------------------------------------------------

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def _project() -> Object:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_dockerfile_is_clean() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_what_the_manifests_think() -> None:
    assert 'ENTRYPOINT ["specwire"]' in DOCKERFILE
    assert "USER 10001:10001" in DOCKERFILE
    version = _project()["project"]["version"]
    for name in OVERLAYS:
        for pod in rendered(name).services_pods:
            assert re.fullmatch(rf"specwire:{re.escape(version)}(-cuda)?", pod.container["image"])


def test_digests_are_written_beside_the_tags(tmp_path: Path) -> None:
    """Of every image that is not ours; a digest that is there is replaced."""
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    shutil.copytree(K8S, tmp_path / "k8s")
    shutil.copytree(ROOT / "docs/grafana", tmp_path / "docs/grafana")
    skopeo = tmp_path / "bin" / "skopeo"
    skopeo.parent.mkdir()
    environ = {**os.environ, "PATH": f"{skopeo.parent}:{os.environ['PATH']}"}
    for digest in ("sha256:" + "a" * 64, "sha256:" + "b" * 64):
        skopeo.write_text(f'#!/bin/sh\ncase "$*" in *@*) exit 1;; esac\necho {digest}\n')
        skopeo.chmod(0o755)
        subprocess.run([tmp_path / "k8s/digests.sh"], env=environ, check=True, timeout=30)
        (base,) = re.findall(r"^ARG BASE=(\S+)$", (tmp_path / "Dockerfile").read_text(), re.MULTILINE)
        assert re.fullmatch(rf"python:[^:@]+@{digest}", base)
    manifests = Manifests(render(tmp_path / "k8s/overlays/observability"))
    own = {pod.container["image"] for pod in manifests.services_pods}
    images = {pod.container["image"] for pod in manifests.pods} - own
    assert len(images) == 2
    assert all(re.fullmatch(rf"[^:@]+:[^:@]+@{digest}", image) for image in images)


def test_the_context_of_the_image_has_every_package() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    found = _project()["tool"]["setuptools"]["packages"]["find"]
    packages = {pattern.rstrip("*") for pattern in found["include"]}
    assert {f"!{name}" for name in packages} <= set(lines)
    copied = {"LICENSE", "README.md", "pyproject.toml", "requirements"}  # read by pip, or by the build
    assert {f"!{name}" for name in copied} <= set(lines)
