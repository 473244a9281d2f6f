"""Waits with time limits: one timer for all of them, and each ends in its own time."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from coordinator.peers.waits import Waits


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.TimerHandle]:
    """Those that are made."""
    made: list[asyncio.TimerHandle] = []
    call_at = asyncio.BaseEventLoop.call_at

    def noted(self: Any, when: float, callback: Any, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        handle = call_at(self, when, callback, *args, **kwargs)
        if getattr(callback, "__func__", None) is Waits._expire:
            made.append(handle)
        return handle

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_at", noted)
    return made


def future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def timed_out_after(waits: Waits, timeout_s: float) -> float:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    with pytest.raises(TimeoutError):
        await waits.of(future(), timeout_s)
    return loop.time() - started_s


@pytest.mark.parametrize("limits_s", [(0.02, 0.06, 0.1), (0.1, 0.06, 0.02)], ids=["rising", "falling"])
async def test_waits_of_different_limits_expire_each_in_its_time(limits_s: tuple[float, ...]) -> None:
    """Not before, and not with the one after."""
    waits = Waits()
    async with asyncio.timeout(10):
        took_s = await asyncio.gather(*(timed_out_after(waits, limit_s) for limit_s in limits_s))
    for limit_s, each_s in zip(limits_s, took_s, strict=True):
        assert limit_s <= each_s + 1e-6
    assert sorted(took_s) == sorted(took_s, key=lambda each_s: limits_s[took_s.index(each_s)])


async def test_waits_that_end_in_time_share_one_timer(timers: list[asyncio.TimerHandle]) -> None:
    """A thousand rounds make none of their own."""
    waits = Waits()
    futures = [future() for _ in range(1000)]
    tasks = [asyncio.create_task(waits.of(each, 60.0 + i)) for i, each in enumerate(futures)]
    await asyncio.sleep(0)
    for i, each in enumerate(futures):
        each.set_result(i)
    assert await asyncio.gather(*tasks) == [*range(1000)]
    assert len(timers) == 1
    assert await waits.of(asyncio.ensure_future(asyncio.sleep(0, 7)), 70.0) == 7
    assert len(timers) == 1, "it is not made anew for a later limit"
    assert not waits._due_s


async def test_an_earlier_limit_moves_the_timer(timers: list[asyncio.TimerHandle]) -> None:
    waits = Waits()
    late = asyncio.create_task(waits.of(future(), 60.0))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await timed_out_after(waits, 0.01)
    assert [handle.cancelled() for handle in timers] == [True, False, False]
    assert not late.done()
    late.cancel()
    await asyncio.wait([late])
    assert not waits._due_s, "what is waited for no more is forgotten"


async def test_no_limit_and_none_left(timers: list[asyncio.TimerHandle]) -> None:
    waits, done, endless, too_late = Waits(), future(), future(), future()
    done.set_result(1)
    asyncio.get_running_loop().call_soon(endless.set_result, 2)
    assert await waits.of(done, 0.0) == 1
    assert await waits.of(endless, math.inf) == 2
    for timeout_s in (0.0, -1.0):
        with pytest.raises(TimeoutError):
            await waits.of(too_late, timeout_s)
        too_late = future()
    assert timers == []


async def test_what_is_waited_for_may_fail() -> None:
    waits, failing = Waits(), future()
    asyncio.get_running_loop().call_soon(failing.set_exception, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await waits.of(failing, 60.0)
    assert not waits._due_s
