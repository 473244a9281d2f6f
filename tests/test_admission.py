"""Limits, fairness between clients, and the way back when everything is full."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from coordinator.admission import Admission
from specwire import ResourceExhaustedError
from specwire.tokens import Holder


class Work:
    """Generations that end when told, and the order in which they got their places."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.started: list[str] = []
        self.limits: dict[str, Holder] = {}
        self.finish: dict[str, asyncio.Event] = {}

    def submit(self, client: str, name: str) -> asyncio.Task[None]:
        self.finish[name] = asyncio.Event()
        return asyncio.create_task(self._run(client, name))

    async def _run(self, client: str, name: str) -> None:
        async with self.admission.place(self.limits.get(client, Holder(name=client))):
            self.started.append(name)
            await self.finish[name].wait()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_places_are_given_in_turn_and_given_back():
    work = Work(Admission(max_running=2, max_waiting=8))
    tasks = [work.submit("a", name) for name in ("1", "2", "3", "4")]
    await settle()
    assert work.started == ["1", "2"]
    assert work.admission.num_waiting == 2
    for name in ("1", "2", "3", "4"):
        work.finish[name].set()
        await settle()
    assert work.started == ["1", "2", "3", "4"]
    await asyncio.gather(*tasks)
    assert work.admission.num_running == work.admission.num_waiting == 0


async def test_one_request_does_not_wait_behind_another_clients_many():
    work = Work(Admission(max_running=2, max_waiting=100))
    tasks = [work.submit("many", f"m{i}") for i in range(50)]
    await settle()
    tasks.append(work.submit("one", "o"))
    await settle()
    work.finish["m0"].set()
    await settle()
    assert work.started == ["m0", "m1", "o"]
    for event in work.finish.values():
        event.set()
    await asyncio.gather(*tasks)


async def test_a_full_queue_refuses_with_a_time_to_come_back():
    work = Work(Admission(max_running=1, max_waiting=1))
    tasks = [work.submit("a", "1"), work.submit("a", "2")]
    await settle()
    with pytest.raises(ResourceExhaustedError) as refused:
        await work.submit("a", "3")
    assert refused.value.retry_after_ms is not None
    assert 50 <= refused.value.retry_after_ms <= 10_000
    for event in work.finish.values():
        event.set()
    await asyncio.gather(*tasks)
    assert work.started == ["1", "2"]


async def test_a_full_queue_is_cleared_at_the_cost_of_who_fills_it():
    work = Work(Admission(max_running=1, max_waiting=3))
    many = [work.submit("many", f"m{i}") for i in range(4)]
    await settle()
    one = work.submit("one", "o")
    await settle()
    with pytest.raises(ResourceExhaustedError):
        await many[3]
    work.finish["m0"].set()
    await settle()
    assert work.started == ["m0", "o"]
    for event in work.finish.values():
        event.set()
    await asyncio.gather(one, *many[:3])


async def test_cancelled_while_waiting_or_just_admitted_leaks_no_place():
    admission = Admission(max_running=1, max_waiting=8)
    work = Work(admission)
    first, second, third = (work.submit("a", name) for name in ("1", "2", "3"))
    await settle()
    third.cancel()
    await settle()
    assert admission.num_waiting == 1
    work.finish["1"].set()
    await asyncio.sleep(0)  # the place goes to the second one in this turn ...
    second.cancel()  # ... which is cancelled before it runs
    for task in (first, second, third):
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await settle()
    assert admission.num_running == admission.num_waiting == 0
    last = work.submit("a", "4")
    work.finish["4"].set()
    await last


async def test_a_client_with_limits_of_its_own_waits_while_others_pass():
    work = Work(Admission(max_running=4, max_waiting=8))
    work.limits["few"] = Holder(name="few", max_running=1, max_waiting=2)
    few = [work.submit("few", f"f{i}") for i in range(3)]
    await settle()
    assert work.started == ["f0"]
    other = work.submit("other", "o")
    await settle()
    assert work.started == ["f0", "o"]
    with pytest.raises(ResourceExhaustedError, match="1 generations of few run, 2 wait") as refused:
        await work.submit("few", "f3")
    assert refused.value.retry_after_ms is not None
    work.finish["o"].set()
    await settle()
    assert work.started == ["f0", "o"], "a place that is free is still not for a client at its limit"
    for name in ("f0", "f1", "f2"):
        work.finish[name].set()
        await settle()
    assert work.started == ["f0", "o", "f1", "f2"]
    await asyncio.gather(*few, other)
    assert work.admission.num_running == work.admission.num_waiting == 0


async def test_a_client_that_may_not_wait_is_refused_at_once():
    work = Work(Admission(max_running=4, max_waiting=8))
    work.limits["one"] = Holder(name="one", max_running=1, max_waiting=0)
    first = work.submit("one", "1")
    await settle()
    with pytest.raises(ResourceExhaustedError):
        await work.submit("one", "2")
    work.finish["1"].set()
    await first
