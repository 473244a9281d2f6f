"""SIGTERM: refused at the door, finished inside. Real processes, emulated models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire import (
    AsyncClient,
    AsyncStream,
    Completion,
    GenerationLostError,
    RetryPolicy,
    Rule,
    SamplingParams,
    ServiceUnavailableError,
)
from specwire.cli.process import Service, wait_ready
from specwire.config.fields import split_address
from specwire.config.link import Link
from specwire.config.services import VerifyConfig
from specwire.rpc import server as rpc_server
from specwire.rpc.draining import Drain
from specwire.rpc.server import Server
from tests.support.faulty_proxy import FaultyProxy

PROMPT = [1, 2, 3]
NUM_STREAMS = 200
NUM_TOKENS = 100  # more than an unread generation emits
START_S = 240.0
END_S = 60.0
GRACE_S = 60.0


class TestDrain:
    async def test_admits_no_call_when_closed(self) -> None:
        drain = Drain()
        drain.close()
        with pytest.raises(ServiceUnavailableError, match="shutting down"), drain.request():
            pytest.fail("refused requests do not run")
        assert drain.num_running == 0

    async def test_one_that_fails_is_out_too(self) -> None:
        drain = Drain()
        with pytest.raises(ZeroDivisionError), drain.request():
            raise ZeroDivisionError
        assert await drain.idle(0.0)


async def test_calls_that_grpc_cannot_end_do_not_block_the_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc_server, "_HUNG_S", 0.05)
    server = Server(VerifyConfig(model="emulated:", address="127.0.0.1:0", grace_s=0.0), [])
    await server.start()
    ends = server.grpc.stop

    async def hangs(grace: float | None) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.grpc, "stop", hangs)
    await server.stop()
    assert "gRPC has not ended its calls within 0.05 s" in caplog.text
    await ends(0)


class Processes:
    """Draft, verify and two coordinators, each of which a test ends."""

    def __init__(self) -> None:
        self._started: list[Service] = []
        self.verify = self._start("verify_service", "--model", "emulated:step_ms=5")
        self.draft = self._start("draft_service", "--model", "emulated:step_ms=1,alpha=0.95")
        wait_ready([self.verify, self.draft], START_S)
        self.coordinators = [self.start_coordinator(), self.start_coordinator()]

    def _start(self, module: str, *flags: str, address: str = "127.0.0.1:0") -> Service:
        service = Service(module, [*flags, "--address", address, "--grace-s", str(GRACE_S)])
        self._started.append(service)
        return service

    def start_coordinator(self, address: str = "127.0.0.1:0") -> Service:
        peers = ("--verify-address", self.verify.address, "--draft-address", self.draft.address)
        service = self._start("coordinator", *peers, "--num-draft-tokens", "8", address=address)
        service.ready(START_S)
        return service

    def kill(self) -> None:
        for service in self._started:
            service.kill()


def health(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status


async def ask_to_end(service: Service) -> None:
    """SIGTERM, and wait until it shows."""
    service.terminate()
    deadline = time.monotonic() + END_S
    while await asyncio.to_thread(health, service.address) != health_pb2.HealthCheckResponse.NOT_SERVING:
        assert time.monotonic() < deadline, "still serving"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def begun(client: AsyncClient, num_streams: int) -> AsyncIterator[list[AsyncStream]]:
    """So many generations, begun and not read on: none can end before it is read."""
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=Rule.GUMBEL, seed=1)
    async with contextlib.AsyncExitStack() as stack:
        contexts = [client.stream(params=params, prompt_token_ids=PROMPT) for _ in range(num_streams)]
        streams = [await stack.enter_async_context(context) for context in contexts]
        await asyncio.gather(*(anext(stream) for stream in streams))
        yield streams


async def finish(streams: list[AsyncStream]) -> list[Completion]:
    async def read_on(stream: AsyncStream) -> Completion:
        async for _ in stream:
            pass
        return stream.completion

    return await asyncio.gather(*map(read_on, streams))


class TestSigterm:
    """One after the other on the same processes."""

    @pytest.fixture(scope="class")
    @classmethod
    def processes(cls) -> Iterator[Processes]:
        running = Processes()
        try:
            yield running
        finally:
            running.kill()

    @pytest.mark.slow
    async def test_200_in_flight_and_none_fails(self, processes: Processes) -> None:
        ending, other = processes.coordinators
        addresses = [ending.address, other.address]
        at_once = RetryPolicy(patience_s=0.0)
        async with AsyncClient(addresses) as client, AsyncClient(ending.address, retry=at_once) as alone:
            async with begun(client, NUM_STREAMS) as streams:
                await ask_to_end(ending)
                with pytest.raises(ServiceUnavailableError, match="shutting down"):
                    await alone.generate(params=SamplingParams(max_tokens=4), prompt_token_ids=PROMPT)
                new = await client.generate(params=SamplingParams(max_tokens=4), prompt_token_ids=PROMPT)
                assert (new.usage.completion_tokens, new.num_resumes) == (4, 0), "from the other coordinator"
                done = await finish(streams)
            assert await asyncio.to_thread(ending.process.wait, END_S) == 0
        assert [each.usage.completion_tokens for each in done] == [NUM_TOKENS] * NUM_STREAMS
        assert len({each.token_ids for each in done}) == 1
        assert not any(each.num_resumes for each in done), "the coordinator itself finished them"

    async def test_behind_one_address_another_serves(self, processes: Processes) -> None:
        """A balancer of connections: a request that meets the drain goes over a new one, what runs stays."""
        ending, other = processes.start_coordinator(), processes.start_coordinator()
        balancer = FaultyProxy(ending.address, Link())
        async with balancer as address, AsyncClient(address) as client:
            params = SamplingParams(max_tokens=4)
            await client.generate(params=params, prompt_token_ids=PROMPT)
            async with begun(client, 2) as streams:
                await ask_to_end(ending)
                balancer.to = split_address("to", other.address)
                asked_s = time.monotonic()
                balancer.to = split_address("to", ending.address)  # for a while, as with names that are kept
                asking = asyncio.create_task(client.get_model_info())
                await asyncio.sleep(0.3)
                balancer.to = split_address("to", other.address)
                await asking
                assert time.monotonic() - asked_s < 5.0
                new = [client.generate(params=params, prompt_token_ids=PROMPT) for _ in range(8)]
                for done in await asyncio.gather(*new):
                    assert (done.usage.completion_tokens, done.num_resumes) == (4, 0)
                done_here = await finish(streams)
            assert not any(each.num_resumes for each in done_here)
            assert await asyncio.to_thread(ending.process.wait, END_S) == 0

    async def test_one_that_takes_its_place_later_serves(self, processes: Processes) -> None:
        """With one replica nothing serves for a while: the request waits, as one does that has begun."""
        ending = processes.start_coordinator()
        async with AsyncClient(ending.address) as client:
            params = SamplingParams(max_tokens=4)
            await client.generate(params=params, prompt_token_ids=PROMPT)
            ending.terminate()
            assert await asyncio.to_thread(ending.process.wait, END_S) == 0
            waiting = asyncio.create_task(client.generate(params=params, prompt_token_ids=PROMPT))
            await asyncio.to_thread(processes.start_coordinator, ending.address)
            done = await waiting
            assert (done.usage.completion_tokens, done.num_resumes) == (4, 0)
        async with AsyncClient(processes.verify.address.rpartition(":")[0] + ":1") as stranger:
            began_s = time.monotonic()
            with pytest.raises(ServiceUnavailableError, match="nothing"):
                await stranger.generate(params=params, prompt_token_ids=PROMPT)
            assert time.monotonic() - began_s < 5.0, "an address where nothing ever served is not waited for"

    async def test_a_second_signal_cuts_off_what_runs(self, processes: Processes) -> None:
        ending = processes.start_coordinator()
        retry = RetryPolicy(resume=False)
        async with AsyncClient(ending.address, retry=retry) as client, begun(client, 1) as streams:
            await ask_to_end(ending)
            ending.terminate()
            assert await asyncio.to_thread(ending.process.wait, END_S) == 0
            with pytest.raises(GenerationLostError) as caught:
                await finish(streams)
            assert 0 < caught.value.num_tokens < NUM_TOKENS
