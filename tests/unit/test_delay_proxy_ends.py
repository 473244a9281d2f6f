"""A delay proxy whose link stalls, goes dumb one way, is cut or reset; and what it holds meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import psutil
import pytest

from specwire.config.link import Link
from tests.support.faulty_proxy import Direction, FaultyProxy
from tests.support.links import MS, Linked, Peer, until
from tools.proxy.delay_proxy import MAX_HELD_BYTES

CHUNK = bytes(64 << 10)


class TestStall:
    async def test_holds_the_end_of_a_connection_and_the_start_of_another(self) -> None:
        async with Linked(Link(rtt_ms=2)) as linked:
            client, served = await linked.connect()
            linked.proxy.stall()
            client.writer.close()
            ending = asyncio.create_task(served.reader.read())
            opening = asyncio.create_task(linked.connect())
            done, _ = await asyncio.wait([ending, opening], timeout=0.05)
            assert not done
            linked.proxy.resume()
            assert await ending == b""
            await (await opening)[0].sends_to((await opening)[1], b"new")


@pytest.mark.sample(1)
@pytest.mark.parametrize("direction", Direction)
class TestOneWay:
    """The faults that concern one direction, or one end."""

    @staticmethod
    def sides(pair: tuple[Peer, Peer], direction: Direction) -> tuple[Peer, Peer]:
        """Where a direction comes from, and where it leads to."""
        client, served = pair
        return (client, served) if direction is Direction.THERE else (served, client)

    async def test_a_link_of_one_direction(self, direction: Direction) -> None:
        async with Linked(Link()) as linked:
            near, far = self.sides(await linked.connect(), direction)
            linked.proxy.degrade(direction, Link(rtt_ms=1000))
            assert await far.sends_to(near, b"fast") < 500 * MS
            assert await near.sends_to(far, b"slow") >= 500 * MS
            linked.proxy.degrade(direction, Link())
            assert await near.sends_to(far, b"fast") < 500 * MS

    async def test_silence_in_one_direction(self, direction: Direction) -> None:
        async with Linked(Link(rtt_ms=2)) as linked:
            near, far = self.sides(await linked.connect(), direction)
            linked.proxy.stall(direction)
            near.writer.write(b"held")
            reading = asyncio.create_task(far.reader.readexactly(4))
            await far.sends_to(near, b"passed")
            done, _ = await asyncio.wait([reading], timeout=0.05)
            assert not done
            linked.proxy.resume(direction)
            assert await reading == b"held"

    async def test_a_reset_that_one_end_does_not_hear_of(self, direction: Direction) -> None:
        async with Linked(Link()) as linked:
            near, far = self.sides(await linked.connect(), direction)
            linked.proxy.reset(direction)
            with pytest.raises(ConnectionResetError):
                await far.reader.read()
            near.writer.write(b"anyone?")
            hearing = asyncio.create_task(near.reader.read())
            done, _ = await asyncio.wait([hearing], timeout=0.05)
            assert not done
            assert linked.proxy.num_held_bytes == 0
            near.writer.close()
            await until(lambda: linked.proxy.num_connections == 0)

    async def test_an_unasked_for_end(self, direction: Direction) -> None:
        async with Linked(Link(rtt_ms=20)) as linked:
            near, far = self.sides(await linked.connect(), direction)
            linked.proxy.stall(direction)
            near.writer.write(b"before")
            await until(lambda: linked.proxy.num_held_bytes > 0)
            linked.proxy.half_close(direction)
            near.writer.write(b"after")
            linked.proxy.resume(direction)
            assert await far.reader.read() == b"before"
            await far.sends_to(near, b"still")
            far.writer.close()
            assert await near.reader.read() == b""
            near.writer.close()
            await until(lambda: linked.proxy.num_connections == 0)

    async def test_an_end_that_comes_late(self, direction: Direction) -> None:
        async with Linked(Link()) as linked:
            near, far = self.sides(await linked.connect(), direction)
            started = time.monotonic()
            linked.proxy.close_slowly(direction, 0.2)
            assert await near.reader.read() == b""
            far.writer.write(b"lost")
            assert await far.reader.read() == b""
            assert time.monotonic() - started >= 0.2
            far.writer.close()
            await until(lambda: linked.proxy.num_connections == 0)


class TestEnds:
    async def test_half_a_close(self) -> None:
        async with Linked(Link(rtt_ms=40)) as linked:
            client, served = await linked.connect()
            started = time.monotonic()
            client.writer.write(b"question")
            client.writer.write_eof()
            assert await served.reader.read() == b"question"
            assert time.monotonic() - started >= 20 * MS
            assert linked.proxy.num_connections == 1
            served.writer.write(b"answer")
            served.writer.close()
            assert await client.reader.read() == b"answer"
            await until(lambda: linked.proxy.num_connections == 0)

    @pytest.mark.parametrize("which", [0, 1], ids=["client", "service"])
    async def test_a_reset_is_passed_on_one_delay_later(self, which: int) -> None:
        async with Linked(Link(rtt_ms=40)) as linked:
            sides = await linked.connect()
            started = time.monotonic()
            sides[which].reset()
            with pytest.raises(ConnectionResetError):
                await sides[1 - which].reader.read()
            assert time.monotonic() - started >= 20 * MS
            await until(lambda: linked.proxy.num_connections == 0)

    async def test_no_service_at_the_other_end(self, caplog: pytest.LogCaptureFixture) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            to = f"127.0.0.1:{taken.getsockname()[1]}"
        proxy = FaultyProxy(to, Link(rtt_ms=40))
        async with proxy as address:
            started = time.monotonic()
            client = await Peer.connect(address)
            client.writer.write(b"anyone?")
            with pytest.raises(ConnectionResetError):
                await client.reader.read()
            assert time.monotonic() - started >= 40 * MS
            await until(lambda: proxy.num_connections == 0)
        assert f"no connection to {to}" in caplog.text

    async def test_a_cut_resets_all_and_welcomes_others(self) -> None:
        async with Linked(Link(rtt_ms=10_000)) as linked:
            linked.proxy.link = Link()
            sides = [*await linked.connect(), *await linked.connect()]
            linked.proxy.link = Link(rtt_ms=10_000)
            sides[0].writer.write(b"lost")
            linked.proxy.cut()
            for side in sides:
                with pytest.raises(ConnectionResetError):
                    await side.reader.read()
            await until(lambda: linked.proxy.num_connections == 0)
            linked.proxy.link = Link()
            client, served = await linked.connect()
            await client.sends_to(served, b"found")

    async def test_a_cut_before_the_service_knew(self) -> None:
        async with Linked(Link(rtt_ms=10_000)) as linked:
            client = await Peer.connect(linked.address)
            await until(lambda: linked.proxy.num_connections == 1)
            linked.proxy.cut()
            with pytest.raises(ConnectionResetError):
                await client.reader.read()
            await until(lambda: linked.proxy.num_connections == 0)

    async def test_nothing_is_left_of_a_proxy(self) -> None:
        process = psutil.Process()
        num_fds = process.num_fds()
        async with Linked(Link(rtt_ms=1)) as linked:
            client, served = await linked.connect()
            await client.sends_to(served, b"x")
            linked.proxy.stall()
            client.writer.write(b"y")
        with pytest.raises(ConnectionRefusedError):
            await Peer.connect(linked.address)
        await until(lambda: process.num_fds() == num_fds)
        assert len(asyncio.all_tasks()) == 1


async def fill(peer: Peer) -> int:
    """Write until the other end takes no more; returns how many bytes were taken or wait on this side."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        while num_bytes < 256 << 20:
            peer.writer.write(CHUNK)
            num_bytes += len(CHUNK)
            await asyncio.wait_for(peer.writer.drain(), 0.5)
    return num_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("stalled", [False, True], ids=["a service that does not read", "a stall"])
async def test_memory_is_bounded_and_nothing_is_lost(stalled: bool) -> None:
    """What is taken is what the proxy holds and the kernel's buffers do, which are some MB a socket."""
    async with Linked(Link(rtt_ms=2)) as linked:
        client, served = await linked.connect()
        served.writer.transport.pause_reading()  # type: ignore[attr-defined]
        if stalled:
            linked.proxy.stall()
        num_bytes = await fill(client)
        assert MAX_HELD_BYTES <= num_bytes < 40 << 20
        assert linked.proxy.num_held_bytes < 1.25 * MAX_HELD_BYTES
        linked.proxy.resume()
        served.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await served.reader.readexactly(num_bytes) == bytes(num_bytes)
        await served.sends_to(client, b"done")
