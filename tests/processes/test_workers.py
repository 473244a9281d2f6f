"""Several coordinators, and several HTTP fronts, at one port: real processes, real faults."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specwire import AsyncClient, AsyncStream, Completion, ConfigError, SamplingParams
from specwire.cli.process import Service
from specwire.config.fields import next_address
from specwire.config.preflight.plan import check_addresses
from tests.support.fleet import START_S, Fleet
from tests.support.processes import gone, wait_until

NUM_WORKERS = 2
MAX_CLIENTS = 24
"""Each has a connection: all of them reach the same of two workers by a chance of 1 in 8,000,000."""
PROMPT = (3, 1, 4, 1, 5)
GREEDY = SamplingParams(temperature=0, max_tokens=300)
"""A second of passes at least."""
HEAL_S = 60.0


class Coordinators:
    """Two workers before emulated devices."""

    def __init__(self, fleet: Fleet, metrics_address: str) -> None:
        self.address, self.parent = fleet.address, fleet.coordinators[0]
        self._metrics = [next_address("", metrics_address, n) for n in range(NUM_WORKERS)]

    @property
    def workers(self) -> list[psutil.Process]:
        return workers_of(self.parent)

    def running(self) -> list[float]:
        """Generations of each worker; none of one that does not serve."""
        return [metric(each, "specwire_requests_running") for each in self._metrics]


def metric(address: str, name: str) -> float:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
            return sum(each.value for family in families for each in family.samples if each.name == name)
    except OSError:
        return -1.0


def workers_of(parent: Service) -> list[psutil.Process]:
    return psutil.Process(parent.process.pid).children()


def free_addresses() -> str:
    """The first of two ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        with contextlib.suppress(ConfigError):
            check_addresses(
                [(("metrics_address",), next_address("", address, n)) for n in range(NUM_WORKERS)]
            )
            return address


@pytest.fixture(scope="module")
def coordinators() -> Iterator[Coordinators]:
    metrics_address = free_addresses()
    fleet = Fleet(num_models=1, workers=NUM_WORKERS, metrics_address=metrics_address)
    with contextlib.closing(fleet):
        yield Coordinators(fleet, metrics_address)


@contextlib.asynccontextmanager
async def generating(coordinators: Coordinators) -> Any:
    """Clients, and a generation of each that has begun, as many as it takes until all workers have some."""

    async def rest(stream: AsyncStream) -> Completion:
        async for _ in stream:
            pass
        return stream.completion

    clients: list[AsyncClient] = []
    tasks: list[asyncio.Task[Completion]] = []
    async with contextlib.AsyncExitStack() as stack:
        while min(coordinators.running()) < 1:
            assert len(clients) < MAX_CLIENTS
            clients.append(await stack.enter_async_context(AsyncClient(coordinators.address)))
            generation = clients[-1].stream(params=GREEDY, prompt_token_ids=PROMPT)
            stream = await stack.enter_async_context(generation)
            await anext(stream)
            tasks.append(asyncio.create_task(rest(stream)))
        yield clients, tasks


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        # Of 10 s; a shorter time is tested in `test_supervisor.py`.
        pytest.param(signal.SIGSTOP, id="hangs", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_that_fails_is_replaced_and_no_generation_is_lost(
    coordinators: Coordinators, fault: signal.Signals
) -> None:
    """They are resumed at the other one. Each worker answers for itself."""
    victim = coordinators.workers[0]
    async with generating(coordinators) as (clients, tasks):
        found = [await client.get_status() for client in clients]
        assert {status.num_workers for status in found} == {NUM_WORKERS}
        assert max(status.num_running for status in found) < len(tasks)
        victim.send_signal(fault)
        done = await asyncio.gather(*tasks)
        assert len({each.token_ids for each in done}) == 1
        assert any(each.num_resumes for each in done)
    wait_until(lambda: gone(victim), HEAL_S)
    wait_until(lambda: coordinators.running() == [0, 0], HEAL_S)
    assert len(coordinators.workers) == NUM_WORKERS


def test_a_port_in_use_is_refused(coordinators: Coordinators) -> None:
    service = Service("coordinator", ["--address", coordinators.address, "--workers", "2"])
    with pytest.raises(ConfigError, match=f"--address {coordinators.address}: cannot be bound"):
        service.ready(START_S)


def test_a_worker_that_cannot_start_ends_the_command() -> None:
    flags = ["--verify-address", "127.0.0.1:1", "--connect-timeout-s", "0.2", "--workers", "2"]
    service = Service("coordinator", [*flags, "--address", "127.0.0.1:0"])
    with pytest.raises(ConfigError, match=r"verify service 127\.0\.0\.1:1: nothing serves"):
        service.ready(START_S)


async def test_all_workers_drain(coordinators: Coordinators) -> None:
    """The last test of these."""
    workers = coordinators.workers
    async with generating(coordinators) as (_, tasks):
        coordinators.parent.terminate()
        done = await asyncio.gather(*tasks)
        assert len({each.token_ids for each in done}) == 1
        assert not any(each.num_resumes for each in done)
    assert coordinators.parent.process.wait(HEAL_S) == 0
    assert all(map(gone, workers))


@pytest.mark.slow
def test_fronts_share_a_port() -> None:
    """They start without their coordinator, and one that is killed or hangs is replaced."""
    flags = ["--server", "127.0.0.1:1", "--address", "127.0.0.1:0", "--workers", "2"]
    front = Service("specwire.cli", ["http", *flags])
    try:
        address = front.ready(START_S)
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            victim = min(workers_of(front), key=psutil.Process.create_time)  # it serves already
            victim.send_signal(fault)
            # Until its parent has reaped it: its last thread may hold the socket, and resets connections.
            victim.wait(HEAL_S)
            for _ in range(8):
                with urllib.request.urlopen(f"http://{address}/", timeout=5) as response:
                    assert response.status == 200
            wait_until(lambda: len(workers_of(front)) == NUM_WORKERS, HEAL_S)
        workers = workers_of(front)
    finally:
        assert front.stop() == 0
    assert all(map(gone, workers))
