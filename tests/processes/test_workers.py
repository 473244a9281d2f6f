"""Several processes as one coordinator, and several HTTP fronts at one port: real processes, real faults."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specwire import AsyncClient, ConfigError, ResourceExhaustedError, SamplingParams, ServiceUnavailableError
from specwire.cli.process import Service
from specwire.client.connections import Connections
from specwire.security.bearer import make_token
from tests.support.fleet import START_S, Fleet
from tests.support.processes import gone, wait_until
from tests.support.rigs import is_serving

NUM_WORKERS, MAX_RUNNING, MAX_WAITING = 2, 6, 4
PROMPT = (3, 1, 4, 1, 5)
GREEDY = SamplingParams(temperature=0, max_tokens=100, num_draft_tokens=4)
SLOW = SamplingParams(temperature=0, max_tokens=400, num_draft_tokens=0)
"""Four seconds of passes."""
HEAL_S = 60.0


class Coordinator:
    """One coordinator of several workers, before emulated devices."""

    def __init__(self, fleet: Fleet, tokens: dict[str, str], metrics_address: str) -> None:
        self.address = fleet.address
        self.parent = fleet.coordinators[0]
        self._tokens, self._metrics_address = tokens, metrics_address
        self.expected = asyncio.run(self._generate())

    def client(self, name: str = "alice") -> AsyncClient:
        return AsyncClient(self.address, token=self._tokens[name])

    async def _generate(self) -> tuple[int, ...]:
        async with self.client() as client:
            return (await client.generate(params=GREEDY, prompt_token_ids=PROMPT)).token_ids

    @property
    def workers(self) -> list[psutil.Process]:
        return workers_of(self.parent)

    def metric(self, name: str) -> float:
        """The sum of its samples."""
        with urllib.request.urlopen(f"http://{self._metrics_address}/metrics", timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
            return sum(each.value for family in families for each in family.samples if each.name == name)

    def wait_until_whole(self) -> None:
        wait_until(lambda: self.metric("specwire_workers") == NUM_WORKERS, HEAL_S)


def workers_of(parent: Service) -> list[psutil.Process]:
    return psutil.Process(parent.process.pid).children()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Bob may have two generations, Alice as many as there is room for."""
    tokens = {}
    lines = []
    for name, limits in (("alice", {}), ("bob", {"max_running": 2})):
        tokens[name], line = make_token(name, **limits)
        lines.append(line)
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text("\n".join(lines))
    metrics_address = free_address()
    fleet = Fleet(
        workers=NUM_WORKERS,
        max_running=MAX_RUNNING,
        max_waiting=MAX_WAITING,
        tokens=file,
        metrics_address=metrics_address,
    )
    with contextlib.closing(fleet):
        yield Coordinator(fleet, tokens, metrics_address)


def connections_of(client: AsyncClient) -> Connections:
    return client._endpoints[0].connections


@contextlib.asynccontextmanager
async def client_of_each_worker(
    coordinator: Coordinator, name: str = "alice"
) -> AsyncIterator[list[AsyncClient]]:
    """Clients with one connection each, by the number of its worker."""
    found: dict[int, AsyncClient] = {}
    async with contextlib.AsyncExitStack() as stack:
        while len(found) < NUM_WORKERS:
            client = await stack.enter_async_context(coordinator.client(name))
            await client.get_model_info()
            found.setdefault(connections_of(client).first.worker, client)
        yield [found[number] for number in sorted(found)]


async def status_until(client: AsyncClient, holds: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(HEAL_S):
        while not holds(status := await client.get_status()):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.02)
    return status


class Running:
    """Generations on given clients, which end with the context."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []

    def start(self, client: AsyncClient, num: int) -> None:
        """So many more."""
        self.tasks += [
            asyncio.create_task(client.generate(params=SLOW, prompt_token_ids=PROMPT)) for _ in range(num)
        ]

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@pytest.mark.slow
def test_each_worker_answers_for_all(coordinator: Coordinator) -> None:
    async def main() -> None:
        async with client_of_each_worker(coordinator) as (one, other), Running() as running:
            before = await one.get_status()
            running.start(one, 1)
            running.start(other, 2)
            for client in (one, other):
                status = await status_until(client, lambda now: now.num_running == 3)
                assert status.uptime_ms >= before.uptime_ms
            await asyncio.gather(*running.tasks)
            for client in (one, other):
                await status_until(client, lambda now: now.num_finished == before.num_finished + 3)
                assert (await client.get_status()).num_running == 0

    run(main)


@pytest.mark.slow
def test_limits_are_those_of_all_workers_together(coordinator: Coordinator) -> None:
    """Running, waiting and refused: exactly as in one process, whichever worker a request is sent to."""

    async def main() -> None:
        async with client_of_each_worker(coordinator) as (one, other), Running() as running:
            running.start(one, MAX_RUNNING - 1)
            running.start(other, 3)
            await status_until(one, lambda now: (now.num_running, now.num_waiting) == (MAX_RUNNING, 2))
            running.start(one, MAX_WAITING - 2)
            await status_until(other, lambda now: now.num_waiting == MAX_WAITING)
            with pytest.raises(
                ResourceExhaustedError, match=f"{MAX_RUNNING} generations run, {MAX_WAITING} wait"
            ):
                async with other.stream(params=SLOW, prompt_token_ids=PROMPT) as stream:
                    await anext(stream)
            for task in running.tasks[: MAX_RUNNING - 1]:
                task.cancel()  # of one worker: those that wait in the other get their slots
            await status_until(one, lambda now: (now.num_running, now.num_waiting) == (MAX_WAITING + 1, 0))

    run(main)


def test_limits_of_a_principal_are_too(coordinator: Coordinator) -> None:
    async def main() -> None:
        async with client_of_each_worker(coordinator, "bob") as (one, other), Running() as running:
            running.start(one, 2)
            running.start(other, 2)
            await status_until(one, lambda now: (now.num_running, now.num_waiting) == (2, 2))

    run(main)
    run_until_idle(coordinator)


def run_until_idle(coordinator: Coordinator) -> None:
    async def main() -> None:
        async with coordinator.client() as client:
            await status_until(client, lambda now: now.num_running == now.num_waiting == 0)

    run(main)


def test_a_busy_client_comes_to_use_all_workers_alike(coordinator: Coordinator) -> None:
    async def main() -> None:
        async with coordinator.client() as client:
            await client.get_model_info()
            connections = connections_of(client)
            assert len(connections._all) == 1
            async with asyncio.timeout(HEAL_S):
                while len({each.worker for each in connections._all}) < NUM_WORKERS:
                    done = await asyncio.gather(
                        *(client.generate(params=GREEDY, prompt_token_ids=PROMPT) for _ in range(4))
                    )
                    assert {each.token_ids for each in done} == {coordinator.expected}
            async with Running() as running:
                running.start(client, 4)
                await status_until(client, lambda now: now.num_running == 4)
                by_worker = {each.worker: each.num_streams for each in connections._all if each.num_streams}
                assert list(by_worker.values()) == [2, 2]

    run(main)
    run_until_idle(coordinator)


def test_a_killed_worker_is_replaced_and_no_generation_is_lost(coordinator: Coordinator) -> None:
    """Its slots are free, its generations are resumed elsewhere, and no count falls."""

    async def main() -> None:
        async with client_of_each_worker(coordinator) as clients:
            tasks = [
                asyncio.create_task(client.generate(params=GREEDY, prompt_token_ids=PROMPT))
                for client in clients
            ]
            await status_until(clients[0], lambda now: now.num_running == NUM_WORKERS)
            victim.kill()
            done = await asyncio.gather(*tasks)
            assert {each.token_ids for each in done} == {coordinator.expected}

    names = (
        *("specwire_requests_total", "specwire_rounds_total", "process_cpu_seconds_total"),
        "gen_ai_server_request_duration_seconds_count",
    )
    before = {name: coordinator.metric(name) for name in names}
    victim = coordinator.workers[0]
    run(main)
    assert gone(victim)
    assert all(coordinator.metric(name) >= before[name] > 0 for name in names)
    run_until_idle(coordinator)
    coordinator.wait_until_whole()
    assert all(coordinator.metric(name) >= before[name] for name in names)
    assert coordinator.metric("specwire_requests_running_limit") == MAX_RUNNING


def test_a_hung_worker_is_replaced_and_new_clients_are_served(coordinator: Coordinator) -> None:
    """But for those whose connection it gets, which are told so: all eight by a chance of 1 in 256."""

    async def served() -> bool:
        async with coordinator.client() as client:
            try:
                done = await client.generate(params=GREEDY, prompt_token_ids=PROMPT, timeout_s=HEAL_S)
            except ServiceUnavailableError:
                return False
            assert done.token_ids == coordinator.expected
            return not gone(victim)

    async def main() -> None:
        assert any(await asyncio.gather(*(served() for _ in range(8))))

    victim = coordinator.workers[0]
    victim.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    run(main)
    wait_until(lambda: gone(victim), HEAL_S)
    assert time.monotonic() - stopped_s < 5.0, "it has had no processor time"
    coordinator.wait_until_whole()
    assert is_serving(coordinator.address)


def test_a_port_in_use_is_refused(coordinator: Coordinator) -> None:
    service = Service("coordinator", ["--address", coordinator.address, "--workers", "2"])
    with pytest.raises(ConfigError, match=f"--address {coordinator.address}: cannot be bound"):
        service.ready(START_S)


def test_a_worker_that_cannot_start_ends_the_command() -> None:
    flags = ["--verify-address", "127.0.0.1:1", "--connect-timeout-s", "0.2", "--workers", "2"]
    service = Service("coordinator", [*flags, "--address", "127.0.0.1:0"])
    with pytest.raises(ConfigError, match=r"verify service 127\.0\.0\.1:1: nothing serves"):
        service.ready(START_S)


@pytest.mark.slow
def test_all_workers_drain(coordinator: Coordinator) -> None:
    """The last test of this coordinator."""

    async def main() -> None:
        async with client_of_each_worker(coordinator) as clients, Running() as running:
            for client in clients:
                running.start(client, 1)
            await status_until(clients[0], lambda now: now.num_running == NUM_WORKERS)
            started_s = time.monotonic()
            coordinator.parent.terminate()
            done = await asyncio.gather(*running.tasks)
            assert len({each.token_ids for each in done}) == 1
            assert time.monotonic() - started_s > 0.5, "they had not ended by themselves"

    workers = coordinator.workers
    run(main)
    assert coordinator.parent.process.wait(HEAL_S) == 0
    assert all(map(gone, workers))


@pytest.mark.slow
def test_fronts_share_a_port() -> None:
    """They start without their coordinator, and one that hangs is replaced while the other serves."""
    flags = ["--server", "127.0.0.1:1", "--address", "127.0.0.1:0", "--workers", "2"]
    front = Service("specwire.cli", ["http", *flags])
    try:
        address = front.ready(START_S)
        victim, _ = workers_of(front)
        victim.send_signal(signal.SIGSTOP)
        for _ in range(8):
            assert status_of(f"http://{address}/") == 200
        wait_until(lambda: gone(victim), HEAL_S)
        wait_until(lambda: len(workers_of(front)) == 2, HEAL_S)
        workers = workers_of(front)
    finally:
        assert front.stop() == 0
    assert all(map(gone, workers))


def status_of(url: str) -> int:
    with urllib.request.urlopen(url, timeout=5) as response:
        return int(response.status)
