"""Draft, verify and coordinator in containers, as `podman kube play` runs what the overlay `secure` renders.

They have a network of their own, on which each is known by its Service's name, and volumes with weights,
certificates and tokens. Podman knows no startup and readiness probes: they are run as the kubelet would.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from specwire import TLS, Client, Rule, SamplingParams, ServiceUnavailableError
from specwire.config.security.bearer import make_token
from tests.support.certificates import Authority
from tests.support.cluster import OOM, loading
from tests.support.harness import LocalStack
from tests.support.manifests import K8S, Manifests, Object, Pod, render
from tests.support.processes import ROOT, START_S, wait_until

HOSTS = {"verify": "specwire-peer", "draft": "specwire-peer", "coordinator": "coordinator.specwire"}
PROMPTS = ["def fibonacci(", "class Queue:"]
FIRST_TOKEN_S = 30.0
READY_S = 120.0
LIMITS = """[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[network]
network_backend = "netavark"
"""
"""Podman's own limits are higher than what may be set without CAP_SYS_RESOURCE; CNI's networks lack names."""

pytestmark = [pytest.mark.slow, pytest.mark.serial]


class Containers:
    """The three services' pods on a network.

    Attributes:
        first_token_s: from the first `podman kube play` to the first token.
        processor_s: what the three took of processors until then.
    """

    def __init__(self, folder: Path, manifests: Manifests) -> None:
        self._folder = folder
        self._network = f"specwire{os.getpid()}"
        (folder / "containers.conf").write_text(LIMITS)
        self._environ = {"CONTAINERS_CONF": str(folder / "containers.conf"), **os.environ}
        self.pods: dict[str, Pod] = {pod.owner.split()[1]: pod for pod in manifests.services_pods}
        self._manifests = manifests
        self.token, line = make_token("me")
        self._files = {"tokens": {"tokens": line}}
        authority = Authority(folder)
        self.ca = authority.path
        for name, host in HOSTS.items():
            pair = authority.pair(name, host)
            files = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": self.ca}
            self._files[f"{name}-tls"] = {key: Path(path).read_text() for key, path in files.items()}
        self.first_token_s = self.processor_s = 0.0

    def podman(self, *args: str) -> str:
        """What the command prints.

        Raises:
            AssertionError: it fails, with what it says.
        """
        done = subprocess.run(  # elsewhere: a kill for memory leaves an empty file `oom` there
            ["podman", *args],
            cwd=self._folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"podman {' '.join(args)}: {done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, weights: dict[str, Path]) -> Iterator[None]:
        """All of them, until a text's first token is there and while the body runs."""
        volumes = set(self.podman("volume", "ls", "-q").split())
        with contextlib.ExitStack() as stack:
            self.podman("network", "create", self._network)
            stack.callback(self._remove, volumes)
            models = self._volume("models")
            for name, path in weights.items():
                shutil.copytree(path, models / name, copy_function=shutil.copyfile)  # podman knows no fsGroup
            for name, files in self._files.items():
                volume = self._volume(name)
                for file, text in files.items():
                    (volume / file).write_text(text)
            began_s = time.monotonic()
            for name in HOSTS:
                self._play(name)
            wait_until(self._has_token, READY_S)
            self.first_token_s = time.monotonic() - began_s
            taken = [psutil.Process(self.state(name)["State"]["Pid"]).cpu_times() for name in HOSTS]
            self.processor_s = sum(times.user + times.system for times in taken)
            for pod in self.pods.values():
                wait_until(lambda pod=pod: self.passes(pod, "readinessProbe"), READY_S)  # type: ignore[misc]
            yield

    def _play(self, name: str) -> None:
        """A Deployment, on our network under the name of its Service."""
        deployment = copy.deepcopy(self._manifests.of("Deployment")[name])
        spec = deployment["spec"]["template"]["spec"]
        del spec["containers"][0]["ports"]  # podman 4 opens them on this machine
        for volume in spec["volumes"]:
            if "secret" in volume:  # of which podman 4.3 writes the files as they are encoded
                volume["persistentVolumeClaim"] = {"claimName": volume.pop("secret")["secretName"]}
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(deployment))
        self.podman("kube", "play", "--network", f"{self._network}:alias={name}", str(file))

    def _volume(self, name: str) -> Path:
        """Where podman keeps one that is made."""
        self.podman("volume", "create", name)
        return Path(self.podman("volume", "inspect", name, "-f", "{{.Mountpoint}}").strip())

    def _remove(self, volumes: set[str]) -> None:
        """All that was made; of volumes, those that were not there before."""
        for pod in self.podman("pod", "ps", "-q", "--filter", f"network={self._network}").split():
            self.podman("pod", "rm", "--force", "--time", "20", pod)
        for volume in {*self.podman("volume", "ls", "-q").split()} - volumes:
            self.podman("volume", "rm", "--force", volume)
        self.podman("network", "rm", self._network)

    def name(self, service: str) -> str:
        """Its container: as podman 4 and 5 call those of a Deployment."""
        names = self.podman("ps", "--all", "--format", "{{.Names}}").split()
        (found,) = (name for name in names if re.fullmatch(rf"{service}-pod(-0)?-specwire", name))
        return found

    def state(self, service: str) -> Any:
        """What podman knows of its container."""
        (found,) = json.loads(self.podman("inspect", self.name(service)))
        return found

    def address(self) -> str:
        """Of the coordinator, as this machine reaches it."""
        pod = self.state("coordinator")["Pod"]
        infra = json.loads(self.podman("pod", "inspect", pod))["InfraContainerID"]
        (found,) = json.loads(self.podman("inspect", infra))
        return f"{found['NetworkSettings']['Networks'][self._network]['IPAddress']}:7070"

    def client(self) -> Client:
        """From outside."""
        tls = TLS(ca=self.ca, server_name=HOSTS["coordinator"])
        return Client(self.address(), tls=tls, token=self.token)

    def _has_token(self) -> bool:
        params = SamplingParams(max_tokens=8)
        with (
            contextlib.suppress(ServiceUnavailableError),
            self.client() as client,
            client.stream(PROMPTS[0], params) as text,
        ):
            next(iter(text))
            return True
        return False

    def passes(self, pod: Pod, kind: str) -> bool:
        """Whether a probe's command succeeds in the container."""
        command = ["podman", "exec", self.name(pod.owner.split()[1]), *pod.probes[kind]["exec"]["command"]]
        return not subprocess.run(
            command, env=self._environ, capture_output=True, timeout=60, check=False
        ).returncode


def rendered(folder: Path) -> Manifests:
    """`secure`, with models of ours in a volume, as docs/kubernetes.md shows."""

    def patch(name: str) -> Object:
        container = {
            "name": "specwire",
            "env": [{"name": "SPECWIRE_MODEL", "value": f"/models/{name}"}],
            "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
        }
        volume = {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        spec = {"template": {"spec": {"containers": [container], "volumes": [volume]}}}
        changed = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}
        return {"patch": json.dumps(changed)}

    kustomization = {
        "resources": [os.path.relpath(K8S / "overlays/secure", folder)],
        "patches": [patch("verify"), patch("draft")],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    return Manifests(render(folder))


@pytest.fixture(scope="module")
def containers(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    folder = tmp_path_factory.mktemp("containers")
    made = Containers(folder, rendered(folder))
    image = made.pods["verify"].container["image"]
    if subprocess.run(["podman", "image", "exists", image], check=False, timeout=60).returncode:
        pytest.skip(f"there is no image {image}: `make image` builds it")
    with made.running({"verify": pair[0], "draft": pair[1]}):
        size = int(made.podman("image", "inspect", image, "-f", "{{.Size}}"))
        took = f"first token after {made.first_token_s:.1f} s, {made.processor_s:.1f} s of processors"
        print(f"{image}: {size / 1e9:.1f} GB, {took}", file=sys.stderr)
        yield made


def test_one_processor_has_the_first_token_in_half_a_minute(containers: Containers) -> None:
    """Whatever else this machine does: the time itself is printed."""
    assert containers.processor_s <= FIRST_TOKEN_S


def test_they_run_as_the_manifests_say(containers: Containers) -> None:
    for name, pod in containers.pods.items():
        state = containers.state(name)
        limit = pod.container["resources"]["limits"]["memory"]
        assert state["HostConfig"]["Memory"] == int(limit.removesuffix("Gi")) << 30
        assert state["HostConfig"]["ReadonlyRootfs"]
        assert state["EffectiveCaps"] in ([], None)
        status = containers.podman("exec", state["Name"], "cat", "/proc/1/status")
        assert re.search(r"^Uid:\t10001\t", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        for kind in pod.probes:
            assert containers.passes(pod, kind), f"{kind} of {name}"
        containers.podman("healthcheck", "run", state["Name"])  # the liveness probe, as podman has it


def test_texts_are_those_outside_also_when_verify_is_killed_for_its_memory(
    containers: Containers, stack: LocalStack
) -> None:
    params = SamplingParams(max_tokens=48, rule=Rule.GUMBEL, seed=7)
    here = {prompt: [*stack.client.generate(prompt, params).token_ids] for prompt in PROMPTS}
    token = Path(containers.ca).with_name("token")
    token.write_text(containers.token)
    client = {
        "LOAD_CA": containers.ca,
        "LOAD_SERVER_NAME": HOSTS["coordinator"],
        "LOAD_TOKEN_FILE": str(token),
    }
    script = [sys.executable, str(ROOT / "tests/support/cluster_load.py"), "sdk", containers.address()]
    before = containers.state("verify")
    with loading([*script, "4", "48", *PROMPTS], {**os.environ, "PYTHONPATH": str(ROOT)} | client) as load:
        subprocess.run(
            ["podman", "exec", before["Name"], "python", "-c", OOM],
            capture_output=True,
            timeout=60,
            check=False,
        )
        wait_until(
            lambda: containers.state("verify")["State"]["StartedAt"] > before["State"]["StartedAt"], 60.0
        )
        so_far = load.so_far()
        wait_until(lambda: load.so_far() >= so_far + 8, START_S)
    load.check()
    assert load.texts == here


def test_a_coordinator_that_is_stopped_ends_its_texts_first(
    containers: Containers, stack: LocalStack
) -> None:
    params = SamplingParams(max_tokens=2000, rule=Rule.GUMBEL, seed=7)
    before = containers.state("coordinator")
    with containers.client() as client, client.stream(PROMPTS[0], params) as text:
        chunks = iter(text)
        token_ids = [*next(chunks).token_ids]
        containers.podman("kill", "--signal", "TERM", before["Name"])
        token_ids += [token for chunk in chunks for token in chunk.token_ids]
    assert token_ids == [*stack.client.generate(PROMPTS[0], params).token_ids]
    wait_until(
        lambda: containers.state("coordinator")["State"]["StartedAt"] > before["State"]["StartedAt"], 60.0
    )
