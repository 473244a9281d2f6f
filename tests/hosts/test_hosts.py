"""Four machines on a real network, whose links are cut, narrowed and changed while seeded requests run.

Network namespaces on a bridge, with the documented commands, TLS and tokens. The coordinator finds draft and
verify by name. Verify's clocks are an hour ahead: those of the kernel that count from its start, by a time
namespace, and the time of day as Python reads it. No packet is delayed: that takes netem.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from specwire import Rule, SamplingParams
from tests.support import recipe
from tests.support.cluster import Load, loading
from tests.support.harness import LocalStack
from tests.support.namespaces import Machines, machines
from tests.support.processes import ROOT, wait_until
from tests.support.recipe import CLIENT, COORDINATOR, DRAFT, VERIFY

NUM_STREAMS = 8
NUM_TOKENS = 48
PROMPTS = ["def fibonacci(", "class Queue:", "import os\n" * 200]
"""The last one is longer than a packet, for verify and draft as well."""
HELD_S = 3.0
"""For which a fault lasts: pings find a silent line within two."""
AGAIN_S = 30.0
"""Until requests end as before; most of it is for a machine that is busy with other things."""
RATE = "256kbit"
MOVED = "10.0.0.12"
HOUR_AHEAD = "unshare --time --monotonic 3600 --boottime 3600 env PYTHONPATH=../clock:$PYTHONPATH"
CLOCK = "import time\nreal, real_ns = time.time, time.time_ns\ntime.time = lambda: real() + 3600\n"
CLOCK += "time.time_ns = lambda: real_ns() + 3600 * 10**9\n"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.serial,
    pytest.mark.skipif(
        any(shutil.which(each) is None for each in ("openssl", "nft", "tc", "unshare")),
        reason="openssl, nft, tc or unshare is not installed",
    ),
]


@dataclass(frozen=True)
class Fault:
    """What happens to the network, and whether requests go on meanwhile."""

    begin: Callable[[Machines], contextlib.AbstractContextManager[None]]
    goes_on: bool


def faults() -> dict[str, Fault]:
    """Those of each link, by its far end; `there` is what this sends to the coordinator."""
    found: dict[str, Fault] = {}
    for name, machine in {"client": CLIENT, "verify": VERIFY, "draft": DRAFT}.items():
        stops = {
            "cut": partial(Machines.cut, machine=machine),
            "silent there": partial(Machines.deaf, machine=COORDINATOR, towards=machine),
            "silent back": partial(Machines.deaf, machine=machine, towards=COORDINATOR),
        }
        narrow = partial(Machines.narrowed, machine=machine, rate=RATE)
        slows = {
            "narrow": narrow,
            "narrow there": partial(narrow, to=False),
            "narrow back": partial(narrow, of=False),
            "1280 bytes": partial(Machines.small_packets, machine=machine, mtu=1280),
        }
        found |= {f"{name}: {what}": Fault(begin, name == "draft") for what, begin in stops.items()}
        found |= {f"{name}: {what}": Fault(begin, True) for what, begin in slows.items()}
    return found


@dataclass(frozen=True)
class Hosts:
    """The four machines while services and requests run."""

    network: Machines
    load: Load


@pytest.fixture(scope="module")
def hosts(
    pair: tuple[Path, Path], stack: LocalStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """At the end no request was lost, and each text is that of the same services on one machine."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "clock").mkdir()
    (folder / "clock/sitecustomize.py").write_text(CLOCK)
    changes = {
        r"--model Qwen/Qwen3-8B --address \S+:": f"--model {pair[0]} --address 0.0.0.0:",
        r"--model \S+0.6B": f"--model {pair[1]}",
        r"specwire verify": f"{HOUR_AHEAD} specwire verify",
        rf"{VERIFY}:7072 --draft-address {DRAFT}:7071": "dns:///verify:7072 --draft-address dns:///draft:7071",
        r"--peer-ca": "--peer-server-name specwire-peer --peer-ca",
        r"subjectAltName=IP:\$host": "subjectAltName=IP:$host,DNS:specwire-peer",
    }

    def changed(line: str) -> str:
        for old, new in changes.items():
            line = re.sub(old, new.replace("\\", r"\\"), line)
        return line

    client = {"LOAD_CA": str(folder / "ca.pem"), "LOAD_TOKEN_FILE": str(folder / "token.txt")}
    script = [sys.executable, str(ROOT / "tests/support/cluster_load.py"), "sdk", f"{COORDINATOR}:7070"]
    script += [str(NUM_STREAMS), str(NUM_TOKENS), *PROMPTS]
    with machines([VERIFY, DRAFT, COORDINATOR, CLIENT]) as network:
        network.call({"verify": VERIFY, "draft": DRAFT})
        with (
            recipe.started(network, folder, changed),
            loading(
                [*network.prefix(CLIENT), *script],
                recipe.environ() | client,
            ) as load,
        ):
            yield Hosts(network, load)
    load.check(at_least=200)
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=Rule.GUMBEL, seed=7)
    here = {prompt: [*stack.client.generate(prompt, params).token_ids] for prompt in PROMPTS}
    assert load.texts == here


@pytest.mark.parametrize("name", faults())
def test_requests_outlive(hosts: Hosts, name: str) -> None:
    fault = faults()[name]
    with fault.begin(hosts.network):
        time.sleep(HELD_S / 3)  # what was on its way has arrived
        if fault.goes_on:
            served(hosts)
        else:
            before = hosts.load.so_far()
            time.sleep(HELD_S * 2 / 3)
            assert hosts.load.so_far() == before
    served(hosts)


def test_an_address_that_changes_under_its_name(hosts: Hosts) -> None:
    hosts.network.move(VERIFY, VERIFY, MOVED)
    hosts.network.call({"verify": MOVED, "draft": DRAFT})
    served(hosts)


def served(hosts: Hosts) -> None:
    """As many texts as are under way, and as many again, end."""
    before = hosts.load.so_far()
    wait_until(lambda: hosts.load.so_far() >= before + 2 * NUM_STREAMS, AGAIN_S)
