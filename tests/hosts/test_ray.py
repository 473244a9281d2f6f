"""A target of two ranks on two machines of a network: Ray's worker is killed, then the head on the other.

Each machine is a network, process and mount namespace that starts what ends, as a kubelet does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specwire import Rule, SamplingParams
from tests.support import recipe
from tests.support.cluster import Load, loading
from tests.support.harness import LocalStack
from tests.support.namespaces import Machines, machines
from tests.support.processes import ROOT, START_S, wait_until

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.serial,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed"),
]
HEAD, WORKER, COORDINATOR, CLIENT = "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"
PROMPTS = ["def fibonacci(", "class Queue:"]
NUM_STREAMS = 2
PARAMS = SamplingParams(max_tokens=48, rule=Rule.GUMBEL, seed=7)
RAY = "--num-cpus=1 --object-store-memory=80000000 --disable-usage-stats"


@contextlib.contextmanager
def kept(network: Machines, machine: str, command: str, log: Path) -> Iterator[None]:
    """A shell's command, again and again, with a /tmp/ray of its own."""
    prepared = "ip route add default dev eth0; mkdir -p /tmp/ray; mount -t tmpfs none /tmp/ray"
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv = [
        *network.prefix(machine),
        *apart,
        "sh",
        "-c",
        f"{prepared}; while true; do {command}; sleep 1; done",
    ]
    # Ranks are found by their host's name, which is one name here; a machine's leads to its own address.
    environ = recipe.environ() | {"GLOO_SOCKET_IFNAME": "eth0", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with log.open("wb") as file, subprocess.Popen(argv, env=environ, stdout=file, stderr=file) as it:
        try:
            yield
        finally:
            it.kill()


def kill(network: Machines, machine: str, program: str) -> None:
    """SIGKILL to a program there."""
    for pid in network.pids(machine):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = psutil.Process(pid).cmdline()  # none of a process that has ended
            if words and words[0].endswith(program):
                os.kill(pid, signal.SIGKILL)
                return
    raise AssertionError(f"{program} does not run")


def test_a_target_over_two_machines(pair: tuple[Path, Path], stack: LocalStack, tmp_path: Path) -> None:
    verify = (
        f"specwire verify --model {pair[0]} --dtype float32 --num-kv-tokens 16384 --tensor-parallel-size 2"
    )
    head = f"ray start --head --port=6379 --include-dashboard=false --node-ip-address={HEAD} {RAY}; "
    head += f"{verify} --ray-address {HEAD}:6379 --address {HEAD}:7072 --allow-plaintext; ray stop --force"
    worker = f"ray start --address={HEAD}:6379 --node-ip-address={WORKER} --block {RAY}"
    coordinator = f"specwire coordinator --verify-address {HEAD}:7072 --address {COORDINATOR}:7070"
    coordinator += " --allow-plaintext --connect-timeout-s 200 --failover-timeout-s 200"
    script = [sys.executable, str(ROOT / "tests/support/cluster_load.py"), "sdk", f"{COORDINATOR}:7070"]
    script += [str(NUM_STREAMS), "48", *PROMPTS]
    with contextlib.ExitStack() as running:
        network = running.enter_context(machines([HEAD, WORKER, COORDINATOR, CLIENT]))
        for machine, command in ((HEAD, head), (WORKER, worker), (COORDINATOR, coordinator)):
            running.enter_context(kept(network, machine, command, tmp_path / machine))
        wait_until(lambda: b"ready" in (tmp_path / COORDINATOR).read_bytes(), START_S)
        load = running.enter_context(loading([*network.prefix(CLIENT), *script], recipe.environ()))
        kill(network, WORKER, "raylet/raylet")
        log = tmp_path / HEAD
        wait_until(lambda: b"the group is back" in log.read_bytes(), START_S)
        served(load)
        for program in ("gcs/gcs_server", "raylet/raylet"):
            kill(network, HEAD, program)
        wait_until(lambda: log.read_bytes().count(b"ready ") == 2, START_S)
        served(load)
    load.check()
    here = {prompt: [*stack.client.generate(prompt, PARAMS).token_ids] for prompt in PROMPTS}
    assert load.texts == here


def served(load: Load) -> None:
    """As many texts as are under way, and as many again, end."""
    before = load.so_far()
    wait_until(lambda: load.so_far() >= before + 2 * NUM_STREAMS, START_S)
