"""The pods of composed manifests as processes: their command lines, environments and files, and their probes.

All run on this machine: ports and directories of files are other ones, and peers are on loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from specwire import TLS, Client, SamplingParams
from specwire.config.security.bearer import make_token
from tests.support.certificates import Authority
from tests.support.manifests import COMPONENT, Manifests, Object, Pod, composed
from tests.support.processes import START_S

pytestmark = pytest.mark.slow

PEER = "specwire-peer"
HOSTS = {"verify": PEER, "draft": PEER, "coordinator": "coordinator.specwire", "http": "http.specwire"}
"""In the certificates, as docs/kubernetes.md says."""
PAIRS = [
    ("http", "tls"),
    ("http", "tokens"),
    ("http", "observability"),
    ("observability", "tls"),
    ("observability", "tokens"),
    ("tls", "tokens"),
]
"""Without autoscaling, which changes no process."""


class Started:
    """Processes by component.

    Attributes:
        ports: of this machine, by those in the manifests.
    """

    def __init__(self, directory: Path, token: str, line: str) -> None:
        self.ports: dict[int, int] = {}
        self.token = token
        self.ca = directory / "ca"
        self._directory = directory
        authority = Authority(self.ca)
        for name, host in HOSTS.items():
            files = directory / name / "tls"
            files.mkdir(parents=True)
            pair = authority.pair(name, host)
            for source, target in ((pair.cert, "tls.crt"), (pair.key, "tls.key"), (authority.path, "ca.crt")):
                (files / target).write_bytes(Path(source).read_bytes())
        (directory / "coordinator/tokens").mkdir()
        (directory / "coordinator/tokens/tokens").write_text(line)

    def start(self, pod: Pod, stack: contextlib.ExitStack) -> None:
        """Start its process, which ends with the stack, and wait until it is ready."""
        name = pod.labels[COMPONENT]
        argv = ["specwire", *(self._here(name, word) for word in pod.container["args"])]
        log = self._directory / name / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                argv, env=self._environ(name, pod), stdout=subprocess.PIPE, stderr=stderr
            )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0], "not ready in time"
        line = process.stdout.readline().decode()
        assert line.startswith("ready "), log.read_text()
        port = pod.ports["http" if name == "http" else "grpc"]
        self.ports[port] = int(line.strip().rpartition(":")[2])

    def _environ(self, name: str, pod: Pod) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith("SPECWIRE_")}
        own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"
        given = {each["name"]: self._here(name, each.get("value", "1")) for each in pod.container["env"]}
        return own | given | {"HOME": own.get("HOME", "/"), "SPECWIRE_NUM_THREADS": "1"}

    def _here(self, name: str, text: str) -> str:
        """What it says of ports, addresses and files, for this machine."""
        text = text.replace("/etc/specwire", str(self._directory / name))
        text = re.sub(r"0\.0\.0\.0:\d+", "0.0.0.0:0", text)
        text = text.replace("jaeger:4317", "127.0.0.1:1")
        return re.sub(
            r"(dns:///)?(verify|draft|coordinator|127\.0\.0\.1):(\d{2,})",
            lambda found: f"127.0.0.1:{self.ports.get(int(found[3]), found[3])}",
            text,
        )

    def is_passed(self, pod: Pod, probe: Object) -> bool:
        """Whether a probe succeeds, run as the kubelet does."""
        name = pod.labels[COMPONENT]
        if "exec" in probe:
            argv = [self._here(name, word) for word in probe["exec"]["command"]]
            return not subprocess.run(argv, env=self._environ(name, pod), check=False).returncode
        if "grpc" in probe:
            server = f"127.0.0.1:{self.ports[probe['grpc']['port']]}"
            argv = ["specwire", "health", "--server", server, "--service", probe["grpc"]["service"]]
            return not subprocess.run(argv, env=self._environ("", pod), check=False).returncode
        ((kind, asked),) = (
            (kind, asked) for kind, asked in probe.items() if kind in ("httpGet", "tcpSocket")
        )
        port = self.ports[pod.ports[asked["port"]]]
        if kind == "tcpSocket":
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return True
        scheme = asked.get("scheme", "HTTP").lower()
        return self.answer(f"{scheme}://127.0.0.1:{port}{asked['path']}") is not None

    def answer(self, url: str, body: Any = None) -> bytes | None:
        """What is answered with 200, unverified; None for anything else."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.token}"}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(url, data, headers if body else {})
        unverified = ssl._create_unverified_context()
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(request, timeout=60, context=unverified) as response,
        ):
            return response.read()
        return None


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_starts_is_healthy_and_generates(pair: tuple[str, str], tmp_path: Path) -> None:
    manifests = Manifests(composed(tmp_path, "local", pair))
    pods = {pod.labels[COMPONENT]: pod for pod in manifests.services_pods}
    token, line = make_token("me")
    started = Started(tmp_path, token, line)
    with contextlib.ExitStack() as stack:
        for name in filter(pods.__contains__, HOSTS):
            started.start(pods[name], stack)
        for name, pod in pods.items():
            for kind, probe in pod.probes.items():
                assert started.is_passed(pod, probe), f"{kind} of {name}"
        if "http" in pods:
            scheme = "https" if "tls" in pair else "http"
            url = f"{scheme}://127.0.0.1:{started.ports[8080]}/v1/completions"
            answer = started.answer(url, {"model": "embedded", "prompt": "import", "max_tokens": 4})
            assert answer is not None
            assert json.loads(answer)["usage"]["completion_tokens"] == 4
        else:
            tls = TLS(ca=str(started.ca / "ca.pem"), server_name=HOSTS["coordinator"])
            address = f"127.0.0.1:{started.ports[7070]}"
            shown = token if "tokens" in pair else ""
            with Client(address, tls=tls if "tls" in pair else None, token=shown) as client:
                done = client.generate("import", SamplingParams(max_tokens=4))
                assert len(done.token_ids) == 4
