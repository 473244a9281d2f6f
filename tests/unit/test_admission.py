"""Limits, fairness between clients, and the way back when everything is full."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from coordinator.admission import Admission
from specwire import ResourceExhaustedError, StreamIdleError
from specwire.config.security.bearer import Principal


class Work:
    """Generations that end when told, and the order in which they got their places."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.started: list[str] = []
        self.limits: dict[str, Principal] = {}
        self.finish: dict[str, asyncio.Event] = {}

    def submit(self, client: str, name: str) -> asyncio.Task[None]:
        self.finish[name] = asyncio.Event()
        return asyncio.create_task(self._run(client, name))

    async def _run(self, client: str, name: str) -> None:
        async with self.admission.slot(self.limits.get(client, Principal(name=client))):
            self.started.append(name)
            await self.finish[name].wait()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_places_are_given_in_turn_and_given_back() -> None:
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


async def test_one_request_does_not_wait_behind_another_clients_many() -> None:
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


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
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


async def test_a_full_queue_is_cleared_at_the_cost_of_who_fills_it() -> None:
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


async def test_cancelled_while_waiting_or_just_admitted_leaks_no_place() -> None:
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


async def test_a_client_with_limits_of_its_own_waits_while_others_pass() -> None:
    work = Work(Admission(max_running=4, max_waiting=8))
    work.limits["few"] = Principal(name="few", max_running=1, max_waiting=2)
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


async def test_a_client_that_may_not_wait_is_refused_at_once() -> None:
    work = Work(Admission(max_running=4, max_waiting=8))
    work.limits["one"] = Principal(name="one", max_running=1, max_waiting=0)
    first = work.submit("one", "1")
    await settle()
    with pytest.raises(ResourceExhaustedError):
        await work.submit("one", "2")
    work.finish["1"].set()
    await first


class Reading:
    """Generations that pause and go on when told; `log` has what they do."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.log: list[str] = []
        self.pause: dict[str, asyncio.Event] = {}
        self.read: dict[str, asyncio.Event] = {}
        self.end: dict[str, asyncio.Event] = {}

    def submit(self, client: str, name: str) -> asyncio.Task[None]:
        for events in (self.pause, self.read, self.end):
            events[name] = asyncio.Event()
        return asyncio.create_task(self._run(client, name))

    async def _run(self, client: str, name: str) -> None:
        async with self.admission.slot(Principal(name=client)) as slot:
            self.log.append(f"{name} runs")
            await self.pause[name].wait()
            async with slot.released():
                await self.read[name].wait()
            self.log.append(f"{name} goes on")
            await self.end[name].wait()

    def counts(self) -> tuple[int, int, int]:
        admission = self.admission
        return admission.num_running, admission.num_waiting, admission.num_paused


async def test_a_paused_generation_gives_its_place_away_and_gets_in_line() -> None:
    work = Reading(Admission(max_running=1, max_waiting=8))
    tasks = [work.submit("a", "a1"), work.submit("b", "b1")]
    await settle()
    work.pause["a1"].set()
    await settle()
    assert work.log == ["a1 runs", "b1 runs"]
    assert work.counts() == (1, 0, 1)
    tasks.append(work.submit("c", "c1"))
    await settle()
    work.read["a1"].set()
    await settle()
    assert work.counts() == (1, 2, 0), "reading again it waits like any other"
    work.pause["b1"].set()
    await settle()
    assert work.log[2:] == ["c1 runs"], "c1 came before"
    work.pause["c1"].set()
    await settle()
    assert work.log[3:] == ["a1 goes on"]
    for event in (*work.read.values(), *work.end.values()):
        event.set()
    await asyncio.gather(*tasks)
    assert work.counts() == (0, 0, 0)


async def test_many_that_go_on_at_once_do_not_pass_one_of_another_client() -> None:
    work = Reading(Admission(max_running=2, max_waiting=8))
    many = [work.submit("many", f"m{i}") for i in range(6)]
    for i in range(6):
        await settle()
        work.pause[f"m{i}"].set()
    await settle()
    assert work.counts() == (0, 0, 6)
    busy = [work.submit("busy", f"busy{i}") for i in range(2)]
    await settle()
    for i in range(6):
        work.read[f"m{i}"].set()
    await settle()
    one = work.submit("one", "o")
    await settle()
    assert work.counts() == (2, 7, 0)
    for i in range(2):
        work.pause[f"busy{i}"].set()
    await settle()
    assert work.log[-2:] == ["m0 goes on", "o runs"]
    for task in (*many, *busy, one):
        task.cancel()
    await asyncio.gather(*many, *busy, one, return_exceptions=True)
    assert work.counts() == (0, 0, 0)


async def test_one_that_goes_on_is_never_refused_and_takes_no_room_of_new_ones() -> None:
    work = Reading(Admission(max_running=1, max_waiting=1))
    paused = [work.submit("a", "a1"), work.submit("a", "a2")]
    for name in ("a1", "a2"):
        await settle()
        work.pause[name].set()
    await settle()
    tasks = [work.submit("b", "b1")]
    await settle()
    for name in ("a1", "a2"):
        work.read[name].set()
    await settle()
    tasks.append(work.submit("b", "b2"))
    await settle()
    assert work.counts() == (1, 3, 0)
    with pytest.raises(ResourceExhaustedError):
        await work.submit("b", "b3")
    assert not any(task.done() for task in (*paused, *tasks))
    for events in (work.pause, work.read, work.end):
        for event in events.values():
            event.set()
    await asyncio.gather(*paused, *tasks)


async def test_over_the_limit_the_client_with_most_paused_loses_the_one_paused_the_longest() -> None:
    work = Reading(Admission(max_running=1, max_waiting=2))
    tasks = {name: work.submit(name[0], name) for name in ("b1", "a1", "a2")}
    for name in tasks:
        await settle()
        work.pause[name].set()
    await settle()
    assert work.counts() == (0, 0, 3)
    tasks["b2"] = work.submit("b", "b2")
    work.pause["b2"].set()
    await settle()
    assert work.counts() == (0, 0, 3)
    with pytest.raises(StreamIdleError, match="too many streams are paused"):
        await tasks.pop("b1")
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert work.counts() == (0, 0, 0)


async def test_paused_and_cancelled_leaks_nothing() -> None:
    work = Reading(Admission(max_running=1, max_waiting=8))
    first, second = work.submit("a", "1"), work.submit("a", "2")
    await settle()
    work.pause["1"].set()
    await settle()
    work.read["1"].set()
    await settle()
    assert work.counts() == (1, 1, 0)
    first.cancel()
    await settle()
    assert work.counts() == (1, 0, 0)
    work.pause["2"].set()
    await settle()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert work.counts() == (0, 0, 0)


async def test_the_time_of_a_pause_is_not_that_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused is told when a place will be free, not when a client will read again."""
    now_s = [0.0]
    monkeypatch.setattr("coordinator.admission.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    work = Reading(Admission(max_running=1, max_waiting=0))
    for i in range(50):
        task = work.submit("a", name := str(i))
        await settle()
        work.pause[name].set()
        await settle()
        now_s[0] += 1000.0
        work.read[name].set()
        work.end[name].set()
        await task
    last = work.submit("a", "last")
    await settle()
    with pytest.raises(ResourceExhaustedError) as refused:
        await work.submit("a", "too many")
    assert refused.value.retry_after_ms == 50
    last.cancel()
