"""Several coordinators behind one name or one balancer: none stands idle beside a full one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from specwire import AsyncClient, ConfigError, InvalidRequestError, SamplingParams
from specwire.config.fields import split_address
from specwire.config.link import Link
from specwire.config.services import CoordinatorConfig
from specwire.rpc import channel, server
from tests.support.faulty_proxy import FaultyProxy
from tests.support.harness import LOOPBACK, local_stack

PROMPT = [1, 2, 3]


async def test_all_addresses_of_a_name_take_calls_in_turn() -> None:
    """`localhost` has two, where there is IPv6."""
    address, one = await naming(b"127.0.0.1")
    _, port = split_address("address", address)
    try:
        _, other = await naming(b"[::1]", f"[::1]:{port}")
    except ConfigError:
        pytest.skip("no IPv6 on this machine")
    async with channel.open_channel(f"dns:///localhost:{port}") as several:
        ask = several.unary_unary("/specwire.Test/Name")
        async with asyncio.timeout(10):
            while {await ask(b"") for _ in range(2)} != {b"127.0.0.1", b"[::1]"}:
                pass  # the first calls go over the connection that is made first
            assert Counter([await ask(b"") for _ in range(8)]) == {b"127.0.0.1": 4, b"[::1]": 4}
    for each in (one, other):
        await each.stop()


@pytest.mark.parametrize("address", ["dns:///a/b:1", "dns://server/a:1", "https://a:1", "dns:///a"])
async def test_what_is_no_name(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="address"):
        AsyncClient(address)


def test_a_connection_does_not_last_and_its_streams_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer can place the client anew, without a loss."""
    monkeypatch.setattr(server, "CONNECTION_AGE_MS", 500)
    with local_stack("emulated:step_ms=1") as one, local_stack("emulated:step_ms=1") as other:
        asyncio.run(over_a_balancer(one.address, other.address))
        assert [each.client.get_status().num_finished for each in (one, other)] == [1, 1]


async def over_a_balancer(one: str, other: str) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
    balancer = FaultyProxy(one, Link())
    async with balancer as address, AsyncClient(address) as client:
        async with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
            await anext(stream)
            balancer.to = split_address("to", other)
            await asyncio.sleep(1.0)
            new = await client.generate(params=params, prompt_token_ids=PROMPT)
            async for _ in stream:
                pass
        assert (new.num_resumes, stream.num_resumes, len(stream.tokens)) == (0, 0, 200)


async def test_no_call_is_refused_while_a_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One channel, one address, and a balancer behind it that leads elsewhere first, as Kubernetes' preStop
    has it: at its age the connection is given up while the server still serves."""
    monkeypatch.setattr(server, "CONNECTION_AGE_MS", 300)
    (one, ending), (other, staying) = [await naming(name) for name in (b"one", b"other")]
    answers: Counter[bytes] = Counter()
    is_over = False
    balancer = FaultyProxy(one, Link(rtt_ms=5))
    async with asyncio.timeout(20), balancer as address, channel.open_channel(address) as single:
        ask = single.unary_unary("/specwire.Test/Name")

        async def ask_on() -> None:
            while not is_over:
                answers[await ask(b"")] += 1

        async def until(holds: Callable[[], bool]) -> None:
            while not holds():
                await asyncio.wait(callers, timeout=0.01, return_when=asyncio.FIRST_EXCEPTION)
                for caller in callers:
                    if caller.done():
                        caller.result()

        callers = [asyncio.create_task(ask_on()) for _ in range(16)]
        await until(lambda: answers[b"one"] > 100)
        balancer.to = split_address("to", other)
        await until(lambda: answers[b"other"] > 100 and balancer.num_connections == 1)
        await ending.stop()
        last = answers[b"one"]
        await until(lambda: answers[b"other"] > 200)
        is_over = True
        await asyncio.gather(*callers)
        assert answers[b"one"] == last
    await staying.stop()


async def naming(name: bytes, address: str = LOOPBACK) -> tuple[str, server.Server]:
    """The address of a server whose method answers with its name, and the server."""

    async def answer(_: bytes, __: object) -> bytes:
        return name

    config = CoordinatorConfig(address=address, grace_s=0.0)
    made = server.Server(config, [], serves_clients=True)
    method = grpc.unary_unary_rpc_method_handler(answer, lambda data: data, lambda data: data)
    handler = grpc.method_handlers_generic_handler("specwire.Test", {"Name": method})
    made.grpc.add_generic_rpc_handlers([handler])
    return await made.start(), made
