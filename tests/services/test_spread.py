"""Several coordinators behind one name or one balancer: none stands idle beside a full one."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import grpc.aio
import pytest

from specwire import AsyncClient, InvalidRequestError, SamplingParams
from specwire.config.fields import split_address
from specwire.config.link import Link
from specwire.rpc import channel, server
from tests.support.harness import local_stack
from tools.proxy.delay_proxy import DelayProxy

PROMPT = [1, 2, 3]


async def test_all_addresses_of_a_name_take_calls_in_turn() -> None:
    """`localhost` has two, where there is IPv6."""
    servers = []
    port = 0
    for host in ("127.0.0.1", "[::1]"):

        async def name(request: bytes, context: object, host: str = host) -> bytes:
            return host.encode()

        one = grpc.aio.server()
        method = {"Name": grpc.unary_unary_rpc_method_handler(name)}
        one.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", method)])
        try:
            port = one.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            pytest.skip("no IPv6 on this machine")
        await one.start()
        servers.append(one)
    async with channel.open_channel(f"dns:///localhost:{port}") as several:
        ask = several.unary_unary("/test/Name")
        async with asyncio.timeout(10):
            while {await ask(b"") for _ in range(2)} != {b"127.0.0.1", b"[::1]"}:
                pass  # the first calls go over the connection that is made first
            assert Counter([await ask(b"") for _ in range(8)]) == {b"127.0.0.1": 4, b"[::1]": 4}
    for one in servers:
        await one.stop(0)


@pytest.mark.parametrize("address", ["dns:///a/b:1", "dns://server/a:1", "https://a:1", "dns:///a"])
async def test_what_is_no_name(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="address"):
        AsyncClient(address)


def test_a_connection_does_not_last_and_its_streams_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer can place the client anew, without a loss."""
    monkeypatch.setattr(server, "_CONNECTION_AGE_MS", 500)
    with local_stack("emulated:step_ms=1") as one, local_stack("emulated:step_ms=1") as other:
        asyncio.run(over_a_balancer(one.address, other.address))
        assert [each.client.get_status().num_finished for each in (one, other)] == [1, 1]


async def over_a_balancer(one: str, other: str) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
    balancer = DelayProxy(one, Link())
    async with balancer as address, AsyncClient(address) as client:
        async with client.stream(params=params, prompt_token_ids=PROMPT) as stream:
            await anext(stream)
            balancer.to = split_address("to", other)
            await asyncio.sleep(1.0)
            new = await client.generate(params=params, prompt_token_ids=PROMPT)
            async for _ in stream:
                pass
        assert (new.num_resumes, stream.num_resumes, len(stream.tokens)) == (0, 0, 200)
