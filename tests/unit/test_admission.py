"""Limits, fairness between clients, and the way back when everything is full."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from coordinator.admission import Admission
from specwire import ResourceExhaustedError, StreamIdleError
from specwire.config.security.bearer import Principal


class Work:
    """Generations that pause, read on and end when told.

    Attributes:
        started: the order in which they got their places; again, when they went on after a pause.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.admission = Admission(max_running=max_running, max_waiting=max_waiting)
        self.started: list[str] = []
        self.limits: dict[str, Principal] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, asyncio.Queue[str]] = defaultdict(asyncio.Queue)

    async def submit(self, client: str, *names: str) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._run(client, name))
        await settle()

    async def _run(self, client: str, name: str) -> None:
        async with self.admission.slot(self.limits.get(client, Principal(name=client))) as slot:
            self.started.append(name)
            while await self._told[name].get() == "pause":
                async with slot.released():
                    await self._told[name].get()
                self.started.append(name)

    async def tell(self, word: str, *names: str) -> None:
        for name in names:
            self._told[name].put_nowait(word)
        await settle()

    async def refused(self, client: str, name: str, match: str | None = None) -> int:
        """After how many milliseconds it is to come back."""
        await self.submit(client, name)
        with pytest.raises(ResourceExhaustedError, match=match) as refused:
            await self.tasks.pop(name)
        assert refused.value.retry_after_ms is not None
        return refused.value.retry_after_ms

    async def all_end(self) -> None:
        """And leave nothing behind."""
        for name in self.tasks:
            await self.tell("read", name)
            await self.tell("end", name)
        await asyncio.gather(*self.tasks.values())
        assert self.counts() == (0, 0, 0)

    async def all_are_cancelled(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert self.counts() == (0, 0, 0)

    def counts(self) -> tuple[int, int, int]:
        admission = self.admission
        return admission.num_running, admission.num_waiting, admission.num_paused


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_request_does_not_wait_behind_another_clients_many() -> None:
    work = Work(max_running=2, max_waiting=100)
    await work.submit("many", *(f"m{i}" for i in range(50)))
    await work.submit("one", "o")
    await work.tell("end", "m0")
    assert work.started == ["m0", "m1", "o"]
    await work.all_end()


async def test_clients_that_come_again_at_once_do_not_pass_one_that_waits() -> None:
    """Two send their next request when the last one has ended, while requests of a third one wait."""
    work = Work(max_running=1, max_waiting=100)
    await work.submit("a", "a0")
    await work.submit("c", "c0")
    await work.submit("many", *(f"m{i}" for i in range(4)))
    for _ in range(9):
        name = work.started[-1]
        await work.tell("end", name)
        if name[0] != "m":
            await work.submit(name[0], f"{name[0]}{int(name[1:]) + 1}")
    assert work.started[:6] == ["a0", "c0", "m0", "a1", "c1", "m1"]
    await work.all_end()


async def test_nothing_is_kept_of_clients_that_are_gone() -> None:
    work = Work(max_running=1, max_waiting=8)
    await work.submit("a", "a0")
    await work.submit("b", "b0")
    await work.submit("a", "a1")
    await work.tell("end", "a0")
    await work.all_are_cancelled()
    assert not work.admission._last_turn


async def test_a_full_queue_is_cleared_at_the_cost_of_who_fills_it() -> None:
    work = Work(max_running=1, max_waiting=3)
    await work.submit("many", *(f"m{i}" for i in range(4)))
    await work.submit("one", "o")
    with pytest.raises(ResourceExhaustedError):
        await work.tasks.pop("m3")
    await work.tell("end", "m0")
    assert work.started == ["m0", "o"]
    await work.all_end()


async def test_cancelled_while_waiting_or_just_admitted_leaks_no_place() -> None:
    work = Work(max_running=1, max_waiting=8)
    await work.submit("a", "1", "2", "3")
    work.tasks["3"].cancel()
    await settle()
    assert work.admission.num_waiting == 1
    ending = asyncio.create_task(work.tell("end", "1"))
    await asyncio.sleep(0)  # the first one is told ...
    await asyncio.sleep(0)  # ... the place goes to the second one in this turn ...
    work.tasks["2"].cancel()  # ... which is cancelled before it runs
    await ending
    assert work.started == ["1"]
    assert work.counts() == (0, 0, 0)
    work.tasks.clear()
    await work.submit("a", "4")
    await work.all_end()


async def test_one_that_is_cancelled_as_another_comes_makes_room_for_it() -> None:
    work = Work(max_running=1, max_waiting=2)
    await work.submit("many", "m0", "m1", "m2")
    coming = asyncio.create_task(work.submit("few", "f0"))
    await asyncio.sleep(0)  # its task is to run next ...
    work.tasks.pop("m2").cancel()  # ... and this one after it
    await coming
    assert work.admission.num_waiting == 2
    await work.all_end()
    assert sorted(work.started) == ["f0", "m0", "m1"]


async def test_a_client_with_limits_of_its_own_waits_while_others_pass() -> None:
    work = Work(max_running=4, max_waiting=8)
    work.limits["few"] = Principal(name="few", max_running=1, max_waiting=2)
    await work.submit("few", "f0", "f1", "f2")
    assert work.started == ["f0"]
    await work.submit("other", "o")
    assert work.started == ["f0", "o"]
    await work.refused("few", "f3", match="1 generations of few run, 2 wait")
    await work.tell("end", "o")
    assert work.started == ["f0", "o"], "a place that is free is still not for a client at its limit"
    await work.all_end()
    assert work.started == ["f0", "o", "f1", "f2"]


async def test_a_client_that_may_not_wait_is_refused_at_once() -> None:
    work = Work(max_running=4, max_waiting=8)
    work.limits["one"] = Principal(name="one", max_running=1, max_waiting=0)
    await work.submit("one", "1")
    await work.refused("one", "2")
    await work.all_end()


async def test_a_paused_generation_gives_its_place_away_and_gets_in_line() -> None:
    work = Work(max_running=1, max_waiting=8)
    await work.submit("a", "a1")
    await work.submit("b", "b1")
    await work.tell("pause", "a1")
    assert work.started == ["a1", "b1"]
    assert work.counts() == (1, 0, 1)
    await work.submit("c", "c1")
    await work.tell("read", "a1")
    assert work.counts() == (1, 2, 0), "reading again it waits like any other"
    await work.tell("pause", "b1")
    assert work.started == ["a1", "b1", "c1"], "c1 came before"
    await work.tell("pause", "c1")
    assert work.started == ["a1", "b1", "c1", "a1"]
    await work.all_end()


async def test_many_that_go_on_at_once_do_not_pass_one_of_another_client() -> None:
    work = Work(max_running=2, max_waiting=8)
    many, busy = [f"m{i}" for i in range(6)], ["busy0", "busy1"]
    await work.submit("many", *many)
    await work.tell("pause", *many)
    assert work.counts() == (0, 0, 6)
    await work.submit("busy", *busy)
    await work.tell("read", *many)
    await work.submit("one", "o")
    assert work.counts() == (2, 7, 0)
    await work.tell("pause", *busy)
    assert work.started[-2:] == ["m0", "o"]
    await work.all_are_cancelled()


async def test_one_that_goes_on_is_never_refused_and_takes_no_room_of_new_ones() -> None:
    work = Work(max_running=1, max_waiting=1)
    await work.submit("a", "a1", "a2")
    await work.tell("pause", "a1", "a2")
    await work.submit("b", "b1")
    await work.tell("read", "a1", "a2")
    await work.submit("b", "b2")
    assert work.counts() == (1, 3, 0)
    await work.refused("b", "b3")
    await work.tell("pause", "b1")
    await work.tell("read", "b1")
    assert work.counts() == (1, 3, 0), "though b2 takes all the room that there is"
    assert not any(task.done() for task in work.tasks.values())
    await work.all_end()


async def test_over_the_limit_the_client_with_most_paused_loses_the_one_paused_the_longest() -> None:
    work = Work(max_running=1, max_waiting=2)
    for name in ("b1", "a1", "a2"):
        await work.submit(name[0], name)
        await work.tell("pause", name)
    assert work.counts() == (0, 0, 3)
    await work.submit("b", "b2")
    await work.tell("pause", "b2")
    assert work.counts() == (0, 0, 3)
    with pytest.raises(StreamIdleError, match="too many streams are paused"):
        await work.tasks.pop("b1")
    await work.all_are_cancelled()


async def test_paused_and_cancelled_leaks_nothing() -> None:
    work = Work(max_running=1, max_waiting=8)
    await work.submit("a", "1", "2")
    await work.tell("pause", "1")
    await work.tell("read", "1")
    assert work.counts() == (1, 1, 0)
    work.tasks["1"].cancel()
    await settle()
    assert work.counts() == (1, 0, 0)
    await work.tell("pause", "2")
    await work.all_are_cancelled()


async def test_the_time_of_a_pause_is_not_that_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused is told when a place will be free, not when a client will read again."""
    now_s = [0.0]
    monkeypatch.setattr("coordinator.admission.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    work = Work(max_running=1, max_waiting=0)
    for i in range(50):
        await work.submit("a", name := str(i))
        await work.tell("pause", name)
        now_s[0] += 1000.0
        await work.tell("read", name)
        await work.tell("end", name)
    await work.submit("a", "last")
    assert await work.refused("a", "too many") == 50
    await work.all_are_cancelled()
