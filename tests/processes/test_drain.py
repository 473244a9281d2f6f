"""SIGTERM: refused at the door, finished inside. Real processes, emulated models."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest

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
from specwire.cli.process import Service
from specwire.config.fields import split_address
from specwire.config.link import Link
from specwire.config.services import VerifyConfig
from specwire.rpc import server as rpc_server
from specwire.rpc.draining import Drain
from specwire.rpc.server import Server
from tests.support.faulty_proxy import FaultyProxy
from tests.support.fleet import Fleet
from tests.support.harness import is_serving
from tests.support.processes import wait_until

PROMPT = [1, 2, 3]
NUM_STREAMS = 200
NUM_TOKENS = 100  # more than an unread generation emits
END_S = 60.0
GRACE_S = 60.0


class TestDrain:
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


async def ask_to_end(service: Service) -> None:
    """SIGTERM, and wait until it shows."""
    service.terminate()
    await asyncio.to_thread(wait_until, lambda: not is_serving(service.address), END_S)


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
    def fleet(cls) -> Iterator[Fleet]:
        with contextlib.closing(
            Fleet(num_models=1, num_coordinators=2, num_draft_tokens=8, grace_s=GRACE_S)
        ) as running:
            yield running

    @pytest.mark.slow
    async def test_200_in_flight_and_none_fails(self, fleet: Fleet) -> None:
        ending, other = fleet.coordinators
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

    async def test_behind_one_address_another_serves(self, fleet: Fleet) -> None:
        """A balancer of connections: a request that meets the drain goes over a new one, what runs stays."""
        ending, other = fleet.start_coordinator(), fleet.coordinators[1]
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

    async def test_one_that_takes_its_place_later_serves(self, fleet: Fleet) -> None:
        """With one replica nothing serves for a while: the request waits, as one does that has begun."""
        ending = fleet.start_coordinator()
        async with AsyncClient(ending.address) as client:
            params = SamplingParams(max_tokens=4)
            await client.generate(params=params, prompt_token_ids=PROMPT)
            ending.terminate()
            assert await asyncio.to_thread(ending.process.wait, END_S) == 0
            waiting = asyncio.create_task(client.generate(params=params, prompt_token_ids=PROMPT))
            await asyncio.to_thread(fleet.start_coordinator, ending.address)
            done = await waiting
            assert (done.usage.completion_tokens, done.num_resumes) == (4, 0)
        async with AsyncClient(fleet.verifies[0].address.rpartition(":")[0] + ":1") as stranger:
            began_s = time.monotonic()
            with pytest.raises(ServiceUnavailableError, match="nothing"):
                await stranger.generate(params=params, prompt_token_ids=PROMPT)
            assert time.monotonic() - began_s < 5.0, "an address where nothing ever served is not waited for"

    async def test_a_second_signal_cuts_off_what_runs(self, fleet: Fleet) -> None:
        ending = fleet.start_coordinator()
        retry = RetryPolicy(resume=False)
        async with AsyncClient(ending.address, retry=retry) as client, begun(client, 1) as streams:
            await ask_to_end(ending)
            ending.terminate()
            assert await asyncio.to_thread(ending.process.wait, END_S) == 0
            with pytest.raises(GenerationLostError) as caught:
                await finish(streams)
            assert 0 < caught.value.num_tokens < NUM_TOKENS
