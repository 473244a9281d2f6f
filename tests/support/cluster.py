"""A Kubernetes cluster of the user's: overlays on it, clients in it, and what happens to it.

`KUBECONFIG` says which cluster, `CLUSTER_IMAGE` what our image is called there.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.manifests import compose, kubectl

NAMESPACE = "specwire"
CLIENTS = "specwire-test"
SERVICES = ("draft", "verify", "coordinator")
READY_S = 240.0
_LOAD = (Path(__file__).parent / "cluster_load.py").read_text()
# Many small processes: the kernel kills the one with the largest sum of its memory and its score.
OOM = """
import os, time
open("/proc/1/oom_score_adj", "w").write("1000")
while True:
    if not os.fork():
        taken = b"x" * (64 << 20)
        time.sleep(60)
    time.sleep(0.02)
"""


class Cluster:
    """What tests do to a cluster. Every call has a bound, and raises when it fails."""

    def __init__(self, image: str) -> None:
        self.image = image

    def kubectl(self, *args: str, given: str | None = None, timeout_s: float = 60.0) -> str:
        """What the command prints; `given` is its standard input.

        Raises:
            AssertionError: it fails, with what it says.
        """
        done = subprocess.run(
            [kubectl(), *args], input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    def get(self, *args: str) -> Any:
        """An object, or a list of objects, in our namespace."""
        return json.loads(self.kubectl("-n", NAMESPACE, "get", *args, "-o", "json"))

    # --- overlays

    def render(self, directory: Path, overlay: str, components: Sequence[str] = ()) -> str:
        """The manifests of an overlay with further components, and with this cluster's image."""
        name, _, tag = self.image.rpartition(":")
        images = [{"name": "specwire", "newName": name, "newTag": tag}]
        compose(directory, overlay, components, images=images)
        return self.kubectl("kustomize", str(directory))

    def apply(self, manifests: str, *options: str) -> None:
        """As the API server takes it strictly: an unknown field is an error."""
        strictly = ("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", "-")
        self.kubectl(*strictly, *options, given=manifests, timeout_s=120.0)

    def delete(self) -> None:
        """All of it. Pods first, at once: with their namespace, Kubernetes waits for half of their grace."""
        self.kubectl("-n", NAMESPACE, "delete", "deployments,hpa", "--all")
        self.kubectl("-n", NAMESPACE, "delete", "pods", "--all", "--grace-period=1", "--wait=false")
        ends_s = time.monotonic() + READY_S
        while self.get("pods")["items"]:
            assert time.monotonic() < ends_s, "pods do not end"
            time.sleep(1)
        self.kubectl("delete", "namespace", NAMESPACE, timeout_s=300.0)

    def deployments(self) -> list[str]:
        """Names of those that are there."""
        return [each["metadata"]["name"] for each in self.get("deployments")["items"]]

    def wait_ready(self, *names: str) -> float:
        """Until these Deployments are rolled out; how long that took, in seconds."""
        began_s = time.monotonic()
        for name in names or self.deployments():
            left = f"--timeout={READY_S:g}s"
            rollout = ("-n", NAMESPACE, "rollout", "status", f"deployment/{name}", left)
            self.kubectl(*rollout, timeout_s=READY_S + 10)
        return time.monotonic() - began_s

    def restart(self, name: str) -> None:
        """Every pod of a Deployment is replaced, and the old ones are gone."""
        self.kubectl("-n", NAMESPACE, "rollout", "restart", f"deployment/{name}")
        self.wait_ready(name)
        ends_s = time.monotonic() + READY_S
        while any(pod["metadata"].get("deletionTimestamp") for pod in self.pods(name)):
            assert time.monotonic() < ends_s, f"a pod of {name} does not end"
            time.sleep(0.5)

    def scale(self, num: int, *names: str) -> None:
        """So many replicas of each."""
        for name in names:
            self.kubectl("-n", NAMESPACE, "scale", f"deployment/{name}", f"--replicas={num}")
        self.wait_ready(*names)

    # --- pods

    def pods(self, component: str) -> list[Any]:
        """Of a component, those that end included."""
        return self.get("pods", "-l", f"app.kubernetes.io/component={component}")["items"]

    def address(self, component: str, port: int) -> str:
        """IP and port of a component's first pod."""
        return f"{self.pods(component)[0]['status']['podIP']}:{port}"

    def kill(self, component: str) -> None:
        """SIGKILL to the first process of a component's pod, by the kernel: its memory limit is reached."""
        pod = self.pods(component)[0]
        name = pod["metadata"]["name"]
        (before,) = (each["restartCount"] for each in pod["status"]["containerStatuses"])
        command = [kubectl(), "-n", NAMESPACE, "exec", name, "--", "python", "-c", OOM]
        subprocess.run(command, capture_output=True, timeout=60, check=False)
        ends_s = time.monotonic() + READY_S
        while True:
            (status,) = self.get("pod", name)["status"]["containerStatuses"]
            if status["restartCount"] > before:
                return
            assert time.monotonic() < ends_s, f"{component} was not killed"
            time.sleep(0.5)

    def connects(self, namespace: str, pod: str, address: str) -> bool:
        """Whether a connection from a pod is accepted within 3 s."""
        host, _, port = address.rpartition(":")
        script = (
            "import socket\n"
            f"try: socket.create_connection(({host!r}, {port}), 3); print('yes')\n"
            "except OSError: print('no')"
        )
        return self.kubectl("-n", namespace, "exec", pod, "--", "python", "-c", script).strip() == "yes"

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """Two pods of our image in a namespace of their own: `friend`, with the label of clients, and
        `stranger`."""
        container = {
            "name": "client",
            "image": self.image,
            "command": ["sleep", "infinity"],
            "resources": {"requests": {"cpu": "100m"}},
        }
        labels = {"friend": {"specwire-client": "true"}, "stranger": {}}
        pods = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": CLIENTS, "labels": label},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
            }
            for name, label in labels.items()
        ]
        self.kubectl("create", "namespace", CLIENTS)
        try:
            self.kubectl("apply", "-f", "-", given="\n---\n".join(map(json.dumps, pods)))
            wait = ("-n", CLIENTS, "wait", "--for=condition=Ready", "pod", "--all", f"--timeout={READY_S:g}s")
            self.kubectl(*wait, timeout_s=READY_S + 10)
            yield
        finally:
            self.kubectl("delete", "namespace", CLIENTS, timeout_s=120.0)

    def bring_openai(self) -> None:
        """OpenAI's client, from here to the friend's pod; the rest of what it needs is in our image."""
        import openai

        packages = Path(openai.__file__).parents[1]
        pack = ["tar", "c", "-C", str(packages), "openai", "jiter", "sniffio"]
        packed = subprocess.run(pack, capture_output=True, check=True, timeout=60)
        unpack = "mkdir -p /tmp/site && tar x -C /tmp/site"
        command = [kubectl(), "-n", CLIENTS, "exec", "-i", "friend", "--", "sh", "-c", unpack]
        subprocess.run(command, input=packed.stdout, check=True, timeout=60)

    def friend(self, script: str, *args: str, timeout_s: float = 120.0) -> str:
        """What a Python script prints in the pod that has the label of clients."""
        command = ("-n", CLIENTS, "exec", "friend", "--", "python", "-c", script, *args)
        return self.kubectl(*command, timeout_s=timeout_s)

    # --- load

    @contextlib.contextmanager
    def loaded(self, api: str, address: str, num_streams: int = 4, num_tokens: int = 48) -> Iterator[Load]:
        """Seeded streams from the friend's pod meanwhile.

        Args:
            api: `sdk`, `once` for the SDK without retries, or `openai` for OpenAI's client without retries.
            address: HOST:PORT, or dns:///NAME:PORT for the SDK.
        """
        environ = ["env", "PYTHONPATH=/tmp/site", "python", "-u", "-c", _LOAD]
        command = [kubectl(), "-n", CLIENTS, "exec", "-i", "friend", "--", *environ, api, address]
        with loading([*command, str(num_streams), str(num_tokens)]) as load:
            yield load


@contextlib.contextmanager
def loading(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[Load]:
    """What a command that runs `cluster_load` does meanwhile; its figures are there at the end."""
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == "begun\n"
            load = Load(running)
            yield load
            out, _ = running.communicate(timeout=180)  # which closes its input: no further ones begin
            load.ended(json.loads(out))
        finally:
            running.kill()


class Load:
    """What became of the streams.

    Attributes:
        done: texts that were complete.
        different: of these, other than the first one of their prompt.
        failed: how often each error was raised.
        longest_pause_s: between two parts of a text, or before the first.
        texts: the first one of each prompt.
    """

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._running = running

    def so_far(self) -> int:
        """How many texts were complete by now."""
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        self._running.stdin.write("\n")
        self._running.stdin.flush()
        return int(self._running.stdout.readline())

    def ended(self, found: dict[str, Any]) -> None:
        """Take the figures; they are printed for the note."""
        self.done: int = found["done"]
        self.different: int = found["different"]
        self.failed: dict[str, int] = found["failed"]
        self.longest_pause_s: float = found["longest_pause_s"]
        self.texts: dict[str, list[Any]] = found.pop("texts")
        print(f"{found}", file=sys.stderr)

    def check(self, *, at_least: int = 1) -> None:
        """Nothing failed, and no text is another one, of at least so many."""
        assert self.failed == {}, self.failed
        assert self.different == 0
        assert self.done >= at_least


@contextlib.contextmanager
def forwarded(service: str, port: int) -> Iterator[str]:
    """HOST:PORT of this machine that leads to a port of a Service meanwhile."""
    command = [kubectl(), "-n", NAMESPACE, "port-forward", f"service/{service}", f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"127\.0\.0\.1:\d+", running.stdout.readline())
            assert found is not None, "the port is not forwarded"
            yield found[0]
        finally:
            running.kill()
