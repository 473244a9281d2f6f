"""The network emulator over real sockets on loopback: what it adds, and what it must not change.

Lower bounds are exact, for nothing may arrive early; upper bounds leave room for a busy machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
import statistics
import struct
import sys
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from specwire import Completion, Rule, SamplingParams
from specwire.config.link import Link
from specwire.errors import ConfigError
from tests.support.faulty_proxy import FaultyProxy
from tests.support.harness import LocalStack, local_stack
from tests.support.links import MS, Linked, Peer, until
from tools.proxy import alarm

TARGET, DRAFT = "emulated:step_ms=2", "emulated:step_ms=0.2,alpha=0.8"


async def round_trips_ms(client: Peer, served: Peer, count: int) -> list[float]:
    found = []
    for _ in range(count):
        there_s = await client.sends_to(served, b"ping")
        found.append((there_s + await served.sends_to(client, b"pong")) * 1e3)
    return found


@pytest.mark.serial
class TestDelay:
    async def test_half_of_it_each_way(self) -> None:
        async with Linked(Link(rtt_ms=40)) as linked:
            client, served = await linked.connect()
            there = [await client.sends_to(served, b"x") for _ in range(9)]
            back = [await served.sends_to(client, b"x") for _ in range(9)]
        for found in (there, back):
            assert min(found) >= 20 * MS
            assert statistics.median(found) < 24 * MS

    async def test_nothing_is_added_by_an_empty_link(self) -> None:
        async with Linked(Link()) as linked:
            found = await round_trips_ms(*await linked.connect(), 50)
        assert statistics.median(found) < 5

    async def test_many_messages_are_under_way_at_once(self) -> None:
        async with Linked(Link(rtt_ms=200)) as linked:
            client, served = await linked.connect()
            reading = asyncio.create_task(served.reader.readexactly(200 * 4))
            started = time.monotonic()
            for i in range(200):
                client.writer.write(struct.pack("i", i))
                await asyncio.sleep(0)  # the proxy, on the same loop, reads it
            data = await reading
            elapsed = time.monotonic() - started
        assert struct.unpack("200i", data) == tuple(range(200))
        assert 100 * MS <= elapsed < 300 * MS, "about one delay, not 200 of them"

    async def test_another_link_is_for_what_comes_in_from_then_on(self) -> None:
        async with Linked(Link(rtt_ms=200)) as linked:
            client, served = await linked.connect()
            started = time.monotonic()
            client.writer.write(b"slow")
            await asyncio.sleep(10 * MS)  # the proxy has it
            linked.proxy.link = Link()
            client.writer.write(b"fast")
            assert await served.reader.readexactly(8) == b"slowfast"
            assert time.monotonic() - started >= 100 * MS, "it does not overtake"
            assert statistics.median(await round_trips_ms(client, served, 9)) < 50


@pytest.mark.serial
class TestBandwidth:
    async def test_the_first_byte_does_not_wait_for_the_last(self) -> None:
        async with Linked(Link(bandwidth_mbps=8)) as linked:
            client, served = await linked.connect()
            started = time.monotonic()
            client.writer.write(bytes(400_000))
            await served.reader.readexactly(1)
            assert time.monotonic() - started < 0.2
            await served.reader.readexactly(399_999)
            assert time.monotonic() - started >= 0.4

    async def test_connections_share_it_and_directions_do_not(self) -> None:
        async with Linked(Link(bandwidth_mbps=8)) as linked:
            (client, served), (client2, served2) = await linked.connect(), await linked.connect()
            data = bytes(200_000)
            started = time.monotonic()
            found = await asyncio.gather(
                client.sends_to(served, data), client2.sends_to(served2, data), served.sends_to(client, data)
            )
            assert time.monotonic() - started >= 0.4
            assert found[2] < 0.35


@pytest.mark.serial
class TestJitter:
    LINK = Link(rtt_ms=20, jitter_ms=10, seed=1)

    @staticmethod
    async def delays_ms(link: Link) -> list[float]:
        async with Linked(link) as linked:
            client, served = await linked.connect()
            return [await client.sends_to(served, b"x") * 1e3 for _ in range(15)]

    async def least_delays_ms(self, link: Link) -> list[float]:
        """Of several runs, since a busy machine adds to some."""
        runs = [await self.delays_ms(link) for _ in range(4)]
        return [min(delays) for delays in zip(*runs, strict=True)]

    async def test_delays_vary_and_the_seed_says_how(self) -> None:
        first, again = await self.least_delays_ms(self.LINK), await self.least_delays_ms(self.LINK)
        other = await self.least_delays_ms(dataclasses.replace(self.LINK, seed=2))
        assert statistics.pstdev(first) > 3
        assert statistics.median(abs(a - b) for a, b in zip(first, again, strict=True)) < 2
        assert statistics.median(abs(a - b) for a, b in zip(first, other, strict=True)) > 2

    async def test_it_is_bounded_below(self) -> None:
        assert min(await self.delays_ms(Link(rtt_ms=20, jitter_ms=4))) >= 6


async def test_a_port_in_use() -> None:
    num_fds = psutil.Process().num_fds()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^--listen {listen}: cannot be bound"):
            await FaultyProxy("127.0.0.1:1", Link(), listen=listen).__aenter__()
    assert psutil.Process().num_fds() == num_fds


@pytest.mark.serial
class TestAlarm:
    @pytest.fixture(params=[sys.platform, "other"])
    async def running(self, request: pytest.FixtureRequest) -> AsyncIterator[alarm.Alarm]:
        with mock.patch.object(alarm, "sys", SimpleNamespace(platform=request.param)):
            made = alarm.Alarm()
        yield made
        made.close()

    async def test_in_order_and_never_early(self, running: alarm.Alarm) -> None:
        called: list[tuple[float, float]] = []
        now = time.monotonic()
        times = [now + ms * MS for ms in (7.3, 2.1, 2.1, 30.0, 0.4, -5.0)]

        def call(when_s: float) -> None:
            called.append((when_s, time.monotonic()))

        for when_s in times:
            running.set(when_s, functools.partial(call, when_s))
        await until(lambda: len(called) == len(times))
        assert [when_s for when_s, _ in called] == sorted(times)
        assert all(called_s >= when_s for when_s, called_s in called)

    async def test_a_time_beyond_all_clocks(self, running: alarm.Alarm) -> None:
        called: list[None] = []
        running.set(1e300, lambda: called.append(None))
        running.set(time.monotonic(), lambda: called.append(None))
        await until(lambda: called != [])
        assert len(called) == 1


class TestBetweenServices:
    """gRPC through it, with emulated devices."""

    PARAMS = SamplingParams(max_tokens=100, rule=Rule.GUMBEL, seed=3)

    def generate(self, stack: LocalStack) -> Completion:
        return stack.client.generate(params=self.PARAMS, prompt_token_ids=[1, 2, 3])

    @pytest.mark.sample(1)
    @pytest.mark.serial
    @pytest.mark.parametrize("which", ["draft_link", "verify_link"])
    def test_a_round_takes_one_round_trip_longer(self, which: str) -> None:
        lockstep = {"num_outcomes": "0"}
        link: dict[str, Any] = {which: Link(rtt_ms=20)}
        with (
            local_stack(TARGET, DRAFT, coordinator_options=lockstep) as near,
            local_stack(TARGET, DRAFT, coordinator_options=lockstep, **link) as far,
        ):
            assert near.draft_proxy is near.verify_proxy is None
            runs = [(self.generate(near), self.generate(far)) for _ in range(3)]
        expected, found = (
            min(done, key=lambda done: done.timing.total_ms) for done in zip(*runs, strict=True)
        )
        assert found.token_ids == expected.token_ids
        assert found.speculation.num_rounds == expected.speculation.num_rounds > 10
        num_rounds = found.speculation.num_rounds
        longer_ms = (found.timing.total_ms - expected.timing.total_ms) / num_rounds
        assert 0.9 * 20 <= longer_ms < 3 * 20
