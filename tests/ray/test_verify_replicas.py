"""`specwire verify` with groups and replicas as real processes: nothing is lost, nothing is left behind."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from specwire import Client, ConfigError, SamplingParams
from specwire.cli import kept
from specwire.cli.process import Service
from specwire.config.fields import next_address
from specwire.config.services import VerifyConfig
from tests.support.harness import local_stack
from tests.support.pairs import save_target
from tests.support.processes import END_S, START_S, Command, gone, running, wait_until
from verify_service import replicas

pytestmark = pytest.mark.slow

pytest.importorskip("ray")

PROMPTS = [[3 + i, 1, 4, 1, 5, 9, 2, 6] for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SMALL = ["--dtype", "float32", "--num-threads", "1", "--num-kv-tokens", "16384"]


class TestFlags:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"replicas": 0}, "--replicas 0: must be at least 1"),
            (
                {"replicas": 3, "address": "127.0.0.1:65534"},
                "--address 127.0.0.1:65534: leaves no room for the ports of 3 replicas",
            ),
            (
                {"replicas": 2, "metrics_address": "127.0.0.1:65535"},
                "--metrics-address 127.0.0.1:65535: leaves no room for the ports of 2 replicas",
            ),
            (
                {"replicas": 3, "address": "127.0.0.1:7072", "metrics_address": "127.0.0.1:7074"},
                "--metrics-address 127.0.0.1:7074: is among the ports of --address",
            ),
        ],
    )
    def test_what_is_refused(self, options: dict[str, Any], problem: str) -> None:
        with pytest.raises(ConfigError, match=f"^{re.escape(problem)}$"):
            VerifyConfig(**options)

    def test_each_gets_ports_a_card_and_a_share_of_its_own(self) -> None:
        config = VerifyConfig(replicas=2, address="127.0.0.1:0", device="cuda", kv_cache_memory=0.5)
        ours = [replicas._config_of(config, index, "") for index in range(2)]
        assert [one.device for one in ours] == ["cuda:0", "cuda:1"]
        assert {(one.replicas, one.address, one.kv_cache_memory) for one in ours} == {(1, "127.0.0.1:0", 0.5)}
        assert replicas._config_of(replace(config, device="cpu"), 1, "").kv_cache_memory == 0.25
        assert [next_address("a", one, 2) for one in ("", "[::1]:0", "a:70")] == ["", "[::1]:0", "a:72"]

    def test_pauses_grow_and_are_bounded(self) -> None:
        assert [kept.pause_s(n) for n in (1, 2, 3, 1000)] == [0.5, 1.0, 2.0, 30.0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "target")


class Streams:
    """Greedy generations that another thread reads, one for each prompt."""

    def __init__(self, address: str) -> None:
        self.found: list[tuple[int, ...]] = []
        self.failed: list[Exception] = []
        self._all_going = threading.Barrier(len(PROMPTS) + 1)
        self._threads = [
            threading.Thread(target=self._read, args=(address, prompt), daemon=True) for prompt in PROMPTS
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_all_go(self) -> None:
        self._all_going.wait(START_S)

    def texts(self) -> set[tuple[int, ...]]:
        for thread in self._threads:
            thread.join(START_S)
        assert not self.failed
        return set(self.found)

    def _read(self, address: str, prompt: list[int]) -> None:
        try:
            with Client(address) as client, client.stream(params=GREEDY, prompt_token_ids=prompt) as stream:
                chunks = iter(stream)
                next(chunks)
                self._all_going.wait(START_S)
                for _ in chunks:
                    pass
                self.found.append(tuple(stream.completion.token_ids))
        except Exception as error:
            self.failed.append(error)


class Running:
    """Two replicas of two ranks each, and a coordinator in front of them."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.own = psutil.Process(command.process.pid)
        self.addresses = command.ready_line().split()[1].split(",")
        flags = ["--address", "127.0.0.1:0", "--verify-address", ",".join(self.addresses)]
        self.coordinator = Service("coordinator", flags)
        self.address = self.coordinator.ready(START_S)

    def services(self) -> dict[str, psutil.Process]:
        """Replicas by the address that they were started at."""
        found: dict[str, psutil.Process] = {}
        for child in self.own.children():
            with contextlib.suppress(psutil.Error):
                listening = [one.laddr.port for one in child.net_connections("tcp") if one.status == "LISTEN"]
                found |= {f"127.0.0.1:{port}": child for port in listening}
        return {address: found[address] for address in self.addresses if address in found}

    def ranks(self) -> list[psutil.Process]:
        """Of all replicas."""
        return [one for one in self.own.children(recursive=True) if _name(one).startswith("ray::Rank")]

    def seen(self) -> dict[str, Any]:
        """Replicas as the coordinator sees them."""
        with Client(self.address) as client:
            return {one.address: one for one in client.get_status().verify_replicas}


class TestTwoReplicasOfTwoRanks:
    """One after the other on the same processes: groups in one Ray instance, which the command started."""

    @pytest.fixture(scope="class")
    @classmethod
    def up(cls, target: Path) -> Iterator[Running]:
        flags = ["--model", str(target), *SMALL, "--replicas", "2", "--tensor-parallel-size", "2"]
        with running("verify", *flags) as command:
            up = Running(command)
            yield up
            up.coordinator.kill()

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, target: Path) -> set[tuple[int, ...]]:
        """What a single process says."""
        with local_stack(target) as alone:
            done = [alone.client.generate(params=GREEDY, prompt_token_ids=prompt) for prompt in PROMPTS]
        assert len({one.token_ids for one in done}) == len(PROMPTS)
        return {tuple(one.token_ids) for one in done}

    def test_both_serve_and_say_what_one_process_says(
        self, up: Running, expected: set[tuple[int, ...]]
    ) -> None:
        assert len(up.services()) == len(set(up.addresses)) == 2
        assert len(up.ranks()) == 4
        streams = Streams(up.address)
        streams.wait_until_all_go()
        assert [one.num_streams for one in up.seen().values()] == [2, 2]
        assert streams.texts() == expected

    def test_a_rank_that_is_killed_changes_no_text(self, up: Running, expected: set[tuple[int, ...]]) -> None:
        before = up.ranks()
        streams = Streams(up.address)
        streams.wait_until_all_go()
        before[0].kill()
        assert streams.texts() == expected
        wait_until(lambda: len(up.ranks()) == 4, START_S)
        assert len([rank for rank in before if not gone(rank)]) == 2, (
            "its group starts again, the other does not"
        )

    def test_a_replica_that_is_killed_changes_no_text_and_comes_back(
        self, up: Running, expected: set[tuple[int, ...]]
    ) -> None:
        killed_at = up.addresses[1]
        before = up.services()
        streams = Streams(up.address)
        streams.wait_until_all_go()
        before[killed_at].kill()
        assert streams.texts() == expected
        wait_until(lambda: len(up.services()) == 2, START_S)
        assert up.services()[killed_at].pid != before[killed_at].pid
        assert up.services()[up.addresses[0]].pid == before[up.addresses[0]].pid
        wait_until(lambda: not up.seen()[killed_at].unavailable, START_S)
        with Client(up.address) as client:
            done = [client.generate(params=GREEDY, prompt_token_ids=prompt) for prompt in PROMPTS]
        assert {tuple(one.token_ids) for one in done} == expected
        assert "verify service 2 ended with status -9" in up.command.errors()

    def test_sigterm_ends_all_of_it(self, up: Running) -> None:
        everything = up.own.children(recursive=True)
        assert len(everything) > 7
        up.coordinator.stop()
        up.command.process.terminate()
        assert up.command.process.wait(END_S) == 0
        wait_until(lambda: all(gone(process) for process in everything), 1.0)
        assert "Traceback" not in up.command.errors()


def test_groups_that_end_before_they_serve_leave_nothing(target: Path, tmp_path: Path) -> None:
    """One by itself, for a reason that only a rank can find out, two by signals; each with its own Ray."""
    broken = save_target(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    flags = [*SMALL, "--tensor-parallel-size", "2", "--address", "127.0.0.1:0"]
    with contextlib.ExitStack() as stack:
        failing, *ended = [
            Group(stack.enter_context(running("verify", "--model", str(model), *flags)))
            for model in (broken, target, target)
        ]
        wait_until(lambda: False not in [group.is_held() for group in (failing, *ended)], START_S)
        for group, number in zip(ended, (signal.SIGINT, signal.SIGTERM), strict=True):
            group.command.process.send_signal(number)
            assert group.command.process.wait(END_S) == -number
            group.assert_gone()
            assert "Traceback" not in group.command.errors()
        failing.go_on()
        assert failing.command.process.wait(START_S) == 2
        assert re.fullmatch(
            rf"error: --model rank [01] on cpu of 127\.0\.0\.1: {re.escape(str(broken))}: "
            r"the checkpoint does not fill the model: 1 missing_keys: .*down_proj.*\n",
            failing.command.errors(),
        )
        failing.assert_gone()


class Group:
    """A command and all its processes; it loads for as long as a test likes, since one rank is stopped."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._own = psutil.Process(command.process.pid)
        self._processes: list[psutil.Process] = []

    def is_held(self) -> bool:
        """Whether it loads, and will not get ready."""
        if not self._processes:
            found = self._own.children(recursive=True)
            ranks = [process for process in found if _name(process).startswith("ray::Rank")]
            if len(ranks) == 2:
                self._processes = found
                self._held = ranks[1]
                self._held.suspend()
                lines = " ".join(word for one in found for word in one.cmdline())
                [folder] = set(re.findall(r"[^= ]*/specwire-ray-\w+", lines))
                self._folder = Path(folder)
        return bool(self._processes)

    def go_on(self) -> None:
        self._held.resume()

    def assert_gone(self) -> None:
        wait_until(lambda: all(gone(process) for process in self._processes), END_S)
        wait_until(lambda: not self._folder.exists(), END_S)


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""
