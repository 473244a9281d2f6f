"""Thousands of streams that others open are refused, while probes are answered and clients are served."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from specwire import AsyncClient, Client, Completion, RequestCancelledError, SamplingParams
from specwire.cli import main as cli
from specwire.cli.process import Service, wait_ready
from specwire.config.security.bearer import make_token
from tests.support import report
from tests.support.effort import CHAOS, sized
from tests.support.flood import GENERATE, WATCH, flood
from tests.support.processes import START_S, wait_until

NUM_WATCHES = sized(2_000, 20_000)
NUM_WATCH_CONNECTIONS = 6
MAX_WATCHES = 128
"""Of one address."""
NUM_SILENT = sized(1_000, 16_000)
MAX_RUNNING, MAX_WAITING, NUM_PASSING = 2, 4, 64
MAX_GROWTH_MIB = 50.0
PARAMS = SamplingParams(max_tokens=20, seed=1)
ENOUGH_S = 5.0
"""Half of the time that a silent stream may last."""
pytestmark = [pytest.mark.serial, pytest.mark.chaos, pytest.mark.timeout(sized(300, 600))]


@dataclass(frozen=True)
class Target:
    """A coordinator that asks for tokens.

    Attributes:
        token: of a client without limits of its own; `few` is one with limits, `some` has one of them.
    """

    coordinator: Service
    token: str
    few: str
    some: str

    @property
    def address(self) -> str:
        return self.coordinator.address

    @property
    def rss_mib(self) -> float:
        return float(psutil.Process(self.coordinator.process.pid).memory_info().rss / 2**20)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    token, line = make_token("client")
    few, few_line = make_token("few", max_running=MAX_RUNNING, max_waiting=MAX_WAITING)
    some, some_line = make_token("some", max_running=MAX_RUNNING)
    Path(tokens).write_text("\n".join([line, few_line, some_line]))
    with contextlib.ExitStack() as stack:
        verify = Service("verify_service", ["--model", "emulated:step_ms=1", "--address", "127.0.0.1:0"])
        stack.callback(verify.kill)
        wait_ready([verify], START_S)
        flags = ["--verify-address", verify.address, "--tokens", str(tokens), "--address", "127.0.0.1:0"]
        coordinator = Service("coordinator", flags)
        stack.callback(coordinator.kill)
        wait_ready([coordinator], START_S)
        yield Target(coordinator, token, few, some)


class Watching:
    """Probes with a second each, as a kubelet's, and one client's generations, meanwhile.

    Attributes:
        num_cancelled: of the generations, by gRPC, which keeps a limited number of a method's calls, of all
            callers together, until they are taken.
        longest_s: of the probes.
        peak_mib: resident memory of the coordinator.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._probe, self._generate)]
        self.num_probes = self.num_failed = self.num_generations = self.num_cancelled = 0
        self.longest_s = self.peak_mib = 0.0

    def _probe(self) -> None:
        while not self._ending.wait(0.02):
            started_s = time.monotonic()
            status = cli.main(["health", "--server", self._target.address, "--timeout-s", "1"])
            self.longest_s = max(self.longest_s, time.monotonic() - started_s)
            self.num_probes += 1
            self.num_failed += status != 0
            self.peak_mib = max(self.peak_mib, self._target.rss_mib)

    def _generate(self) -> None:
        with Client(self._target.address, token=self._target.token) as client:
            while not self._ending.wait(0.05):
                try:
                    assert client.generate(params=PARAMS, prompt_token_ids=[1, 2]).token_ids
                    self.num_generations += 1
                except RequestCancelledError:
                    self.num_cancelled += 1

    def wait_for_enough(self) -> None:
        """The short floods are over before several probes and a generation are done."""
        wait_until(lambda: self.num_probes > 5 and self.num_generations > sized(0, 2), ENOUGH_S)

    def __enter__(self) -> Watching:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()


def test_watches(target: Target) -> None:
    before_mib = target.rss_mib
    with (
        Watching(target) as seen,
        flood(
            target.address,
            WATCH,
            NUM_WATCHES,
            num_connections=NUM_WATCH_CONNECTIONS,
            max_open=MAX_WATCHES,
        ) as watches,
    ):
        counts = watches.counts()
        assert counts["answered"] == counts["open"] == MAX_WATCHES
        assert_refused(counts)
        with flood(target.address, WATCH, 4, num_connections=1, max_open=4, token=target.token) as other:
            assert other.counts()["open"] == 4, "known callers have a limit of their own"
        seen.wait_for_enough()
    assert seen.num_cancelled == 0
    _check(seen, f"{NUM_WATCHES} health watches over {NUM_WATCH_CONNECTIONS} connections", counts, before_mib)


@pytest.mark.parametrize("name", ["few", "some"])
def test_silent_streams_of_one_token(target: Target, name: str) -> None:
    """Of `some` only the running generations are limited: 16 for each of them may wait."""
    most = NUM_PASSING + MAX_RUNNING + (MAX_WAITING if name == "few" else 16 * MAX_RUNNING)
    before_mib = target.rss_mib
    token = getattr(target, name)
    with (
        Watching(target) as seen,
        flood(target.address, GENERATE, NUM_SILENT, num_connections=4, max_open=most, token=token) as silent,
    ):
        counts = silent.counts()
        assert counts["open"] + counts["DEADLINE_EXCEEDED"] >= most  # the flood may take ten seconds itself
        assert counts["open"] <= most
        assert_refused(counts)
        seen.wait_for_enough()
        if CHAOS:
            ended = silent.counts()
            assert ended["DEADLINE_EXCEEDED"] == counts["open"] + counts["DEADLINE_EXCEEDED"]
    what = f"{NUM_SILENT} silent streams, token with max_running {MAX_RUNNING}"
    what += f" and max_waiting {MAX_WAITING}" if name == "few" else ""
    _check(seen, what, counts, before_mib)


async def test_as_many_as_run_and_wait_may_come_at_once(target: Target) -> None:
    """On one connection, all opened before the first message of any is there."""
    async with AsyncClient(target.address, token=target.token) as client:
        one = SamplingParams(max_tokens=1)
        requests = [client.generate(params=one, prompt_token_ids=[1, 2]) for _ in range(256 + 1_024)]
        done = await asyncio.gather(*requests, return_exceptions=True)
    assert Counter(map(type, done)) == {Completion: len(requests)}


def assert_refused(counts: Counter[str]) -> None:
    """All but those that time ends; gRPC itself cancels what comes faster than it is taken."""
    assert counts.keys() <= {"open", "answered", "RESOURCE_EXHAUSTED", "CANCELLED", "DEADLINE_EXCEEDED"}
    assert counts["RESOURCE_EXHAUSTED"] > counts.total() / 10


def _check(seen: Watching, what: str, counts: Counter[str], before_mib: float) -> None:
    assert seen.num_failed == 0
    growth_mib = seen.peak_mib - before_mib
    assert growth_mib < MAX_GROWTH_MIB
    probes = f"{seen.num_probes} probes, longest {seen.longest_s:.2f} s"
    generations = f"another client: {seen.num_generations} generations, {seen.num_cancelled} cancelled"
    report.note(
        what,
        ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count),
        f"{probes}; {generations}; memory +{growth_mib:.0f} MiB",
    )
