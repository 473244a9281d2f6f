"""Who × fault × moment: what a fault of a process, of its device or of a link to it does to clients.

One fleet of processes serves all cells: two drafts, two verify services, two coordinators, an HTTP front, and
a third coordinator behind links to the model services. Outcomes are prepared, and verify goes on with them by
itself: so a fault comes between a verdict and its reading, too. The oracle is the text of the undisturbed
run, by the Gumbel rule. After each cell everything serves again, and no generation, sequence or page is left.
The lost rank of a group is in `tests/ray`.

With CHAOS=1 each of 8 clients has 100 requests, and the bounds are those of the table; otherwise they leave
room for a machine that is busy with other things.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from specwire import AsyncClient, RetryPolicy, ServiceUnavailableError
from specwire.cli.process import Service
from specwire.config.flags import flag_words
from specwire.v1 import generation_pb2
from tests.support import report
from tests.support.effort import CHAOS, sized
from tests.support.fleet import START_S, Fleet, stopped
from tests.support.harness import is_serving, proxied
from tests.support.readers import Load, Seen, run, run_http

NUM_CLIENTS = 8
LOAD = Load(NUM_CLIENTS, sized(2, 100), num_tokens=100)
ONCE = Load(NUM_CLIENTS, 1, num_tokens=100)
AT_CHUNK = 40
"""Of all clients: in mid-stream for each of them."""
PATIENCE_S = 60.0
IDLE_S = 5.0
"""Until no page is held, when no generation runs."""
STOP_S, STOP_GAP_S = sized(2.5, 5.0), sized(2.5, 10.0)
"""Of what has no replica: how long, and the longest gap."""
FAILOVER_S = 3.0
"""Of the coordinator behind links."""
SLACK_S = sized(15.0, 0.0)
DEADLINE_S = 5.0
"""Of generations that have one coordinator alone."""
NO_VERIFY = "GenerationLostError: .*verify service"
NO_COORDINATOR = "GenerationLostError: .*nothing serves at"
NO_FRONT = "RemoteProtocolError: "


@dataclass(frozen=True)
class Cell:
    """One fault at one moment.

    Attributes:
        who: draft, verify, coordinator (one of two), drafts, verifies, coordinators (all), or front.
        fault: kill (SIGKILL), stop (SIGSTOP: alive and silent), hang (of the device: the compute thread is
            stopped, and no other), cut (the link to it is silent), drain (SIGTERM).
        moment: before (the first token), mid(-stream), or between (requests).
        gap_s: longest wait of a client for a chunk; where requests end with an error, for that.
        error: pattern of what all running requests end with, after a prefix of their text; empty: none does.
        max_depth: of the token trees that all requests ask for; 0 for chains, as in the undisturbed run.
    """

    who: str
    fault: str
    moment: str
    gap_s: float
    error: str = ""
    max_depth: int = 0

    @property
    def role(self) -> str:
        """Of the victims."""
        return {"drafts": "draft", "verifies": "verify", "coordinators": "coordinator"}.get(
            self.who, self.who
        )

    @property
    def is_one_of_two(self) -> bool:
        """Whether there is another one to go on with."""
        return self.who in ("draft", "verify", "coordinator")

    @property
    def load(self) -> Load:
        """A front has no other beside it: what comes after its fault would be refused."""
        load = ONCE if self.error or self.who == "front" else LOAD
        return replace(load, max_depth=self.max_depth)


CELLS = [
    # Another draft is taken up; without any, plain decoding.
    Cell("draft", "kill", "mid", 1.0),
    Cell("draft", "kill", "mid", 1.0, max_depth=4),
    Cell("draft", "kill", "before", 1.0),
    Cell("draft", "kill", "between", 1.0),
    Cell("draft", "stop", "mid", 2.0),
    Cell("draft", "stop", "before", 2.0),
    Cell("draft", "hang", "mid", 2.0),
    Cell("draft", "cut", "mid", 2.0),
    Cell("draft", "drain", "mid", 1.0),
    Cell("drafts", "kill", "mid", 1.0),
    Cell("drafts", "stop", "mid", 4.0),
    # Streams are opened at the other one from their committed tokens; without any, they wait, and end after
    # `--failover-timeout-s`. The device of one hangs: 20 times its usual pass, 2 s at least.
    Cell("verify", "kill", "mid", 3.0),
    Cell("verify", "kill", "mid", 3.0, max_depth=4),
    Cell("verify", "kill", "before", 3.0),
    Cell("verify", "kill", "between", 3.0),
    Cell("verify", "stop", "mid", 4.0),
    Cell("verify", "stop", "between", 4.0),
    Cell("verify", "hang", "mid", 3.01),
    Cell("verify", "cut", "mid", 4.0),
    Cell("verify", "drain", "mid", 1.0),
    Cell("verifies", "kill", "mid", 60.0),
    Cell("verifies", "stop", "mid", STOP_GAP_S),
    Cell("verifies", "cut", "mid", 10.0, NO_VERIFY),
    # The client resumes at the other one, once; without any, it says how far it came.
    Cell("coordinator", "kill", "mid", 4.0),
    Cell("coordinator", "kill", "before", 4.0),
    Cell("coordinator", "kill", "between", 4.0),
    # Clients wait for 20 s: a coordinator may just be busy.
    Cell("coordinator", "stop", "mid", 25.0),
    Cell("coordinator", "cut", "mid", 25.0),
    Cell("coordinator", "drain", "mid", 1.0),
    Cell("coordinators", "kill", "mid", DEADLINE_S + 2.0, NO_COORDINATOR),
    # An HTTP client cannot resume: what a front has begun ends with it, or is finished by it.
    Cell("front", "kill", "mid", 5.0, NO_FRONT),
    Cell("front", "stop", "mid", STOP_GAP_S),
    Cell("front", "drain", "mid", 1.0),
]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(sized(300, 900))]


class Rig:
    """The fleet, a coordinator behind links to its model services, and a link to the first coordinator.

    Attributes:
        links: by role, in the order of the fleet.
        far: address of the coordinator behind links.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.fleet = Fleet(num_coordinators=2, num_fronts=1, failover_timeout_s=PATIENCE_S, num_outcomes="8")
        stack.callback(self.fleet.close)
        self.links = {
            role: [stack.enter_context(proxied(each.address)) for each in self.fleet.group(role)]
            for role in ("draft", "verify", "coordinator")
        }
        flags: dict[str, object] = {"address": "127.0.0.1:0", "failover_timeout_s": FAILOVER_S}
        for role in ("draft", "verify"):
            flags[f"{role}_address"] = ",".join(one.address for one in self.links[role])
        far = Service("coordinator", flag_words(**self.fleet.coordinator_flags | flags))
        stack.callback(far.kill)
        self.far = far.ready(START_S)

    def address(self, cell: Cell) -> str:
        """For the clients of a cell."""
        coordinators = self.fleet.coordinators
        if cell.who == "front":
            return self.fleet.fronts[0].address
        if cell.who == "coordinators":
            return coordinators[0].address
        if cell.fault == "cut":
            behind = f"{self.links['coordinator'][0].address},{coordinators[1].address}"
            return behind if cell.who == "coordinator" else self.far
        return self.fleet.address

    async def load(self, cell: Cell, load: Load, seen: Seen, *, is_over: bool = False) -> Seen:
        """What the clients of a cell do, with its fault or once that is over."""
        if cell.who == "front":
            return await run_http(self.address(cell), load, seen)
        client: dict[str, Any] = {}
        if cell.who == "coordinators" and not is_over:  # its patience ends with the deadline
            client = {"retry": RetryPolicy(patience_s=PATIENCE_S), "timeout_s": DEADLINE_S}
        elif cell.error:
            client = {"retry": RetryPolicy(resume=False)}
        return await run(self.address(cell), load, seen, **client)

    async def victims(self, cell: Cell) -> list[int]:
        """Of one of two, the one with the most streams."""
        if cell.role in ("front", "coordinator"):
            return [0]
        if not cell.is_one_of_two:
            return [0, 1]
        replicas = seen_as(await status(self.address(cell)), cell.role)
        return [max(range(len(replicas)), key=lambda i: replicas[i].num_streams)]

    @contextlib.contextmanager
    def fault(self, cell: Cell, index: int) -> Iterator[None]:
        """To one of the role; what has ended starts again afterwards."""
        if cell.fault == "cut":
            self.links[cell.role][index].stall()
            try:
                yield
            finally:
                self.links[cell.role][index].resume()
        else:
            with self.fleet.disturbed(cell.role, index, cell.fault):
                yield

    async def restored(self) -> None:
        """Wait until everything serves, and nothing is left."""
        await self.fleet.complete()
        for address in (*self.fleet.address.split(","), self.far):
            await until(partial(is_idle, address))
        await until(self.is_free, IDLE_S)
        for service in self.fleet.services:
            if service not in self.fleet.fronts:
                assert await asyncio.to_thread(is_serving, service.address)

    async def is_free(self) -> bool:
        return not await asyncio.to_thread(self.fleet.num_held)


async def status(address: str) -> generation_pb2.GetStatusResponse:
    async with AsyncClient(address) as client:
        return await client.get_status()


def seen_as(now: generation_pb2.GetStatusResponse, role: str) -> list[generation_pb2.ReplicaStatus]:
    """Replicas of a role, as a coordinator sees them."""
    return list({"draft": now.draft_replicas, "verify": now.verify_replicas}.get(role, ()))


async def is_idle(address: str) -> bool:
    """All replicas are available, and nothing runs there."""
    try:
        now = await status(address)
    except ServiceUnavailableError:  # gRPC has not tried the address again since it was down
        return False
    replicas = [*now.verify_replicas, *now.draft_replicas]
    is_used = any(one.unavailable or one.num_streams for one in replicas)
    return not (is_used or now.num_running or now.num_waiting or now.num_paused)


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def over(rig: Rig, cell: Cell, victims: list[int], loading: asyncio.Task[Seen]) -> None:
    """Until the fault may end."""
    if cell.fault == "drain":
        for index in victims:
            await asyncio.to_thread(rig.fleet.group(cell.role)[index].process.wait, PATIENCE_S)
    elif cell.error or cell.who == "coordinator":
        await loading
    elif cell.is_one_of_two:
        await until(partial(is_noticed, rig.address(cell), cell, victims[0], loading))
    elif cell.fault == "stop":
        await asyncio.sleep(STOP_S)


async def is_noticed(address: str, cell: Cell, index: int, loading: asyncio.Task[Seen]) -> bool:
    """The coordinator says why it opens no streams there; drafts may be late until the load is done."""
    why = seen_as(await status(address), cell.role)[index].unavailable
    if cell.role == "verify":
        return bool(why) and (cell.fault != "hang" or "hangs" in why)
    return bool(why) or loading.done()


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        yield Rig(stack)


@pytest.fixture(scope="module")
def undisturbed(rig: Rig) -> Seen:
    seen = asyncio.run(run(rig.fleet.address, Load(NUM_CLIENTS, min(LOAD.num_requests, 5), LOAD.num_tokens)))
    assert seen.errors == []
    assert seen.num_accepted > 0
    return seen


def named(cell: Cell) -> Any:
    trees = "-trees" if cell.max_depth else ""
    marks = [pytest.mark.serial] if (cell.who, cell.fault) == ("verify", "hang") else []
    return pytest.param(cell, marks=marks, id=f"{cell.who}-{cell.fault}-{cell.moment}{trees}")


@pytest.mark.slow
@pytest.mark.parametrize("cell", [named(cell) for cell in CELLS])
async def test_cell(rig: Rig, undisturbed: Seen, cell: Cell, request: pytest.FixtureRequest) -> None:
    try:
        found = await disturbed(rig, cell)
    finally:
        await rig.restored()
    found.note(cell)
    check_promise(cell, found.seen, undisturbed)
    is_tight = cell.error or request.node.get_closest_marker("serial")
    assert found.gap_s < cell.gap_s + (0.0 if is_tight else SLACK_S)
    if not cell.error:
        is_resumed = cell.who == "coordinator" and (cell.fault, cell.moment) in RESUMED
        assert found.seen.num_resumes == (NUM_CLIENTS if is_resumed else 0)
    if cell.who == "verify":
        assert bool(found.num_lost) is (cell.fault != "drain")
    if cell.is_one_of_two:
        assert found.num_accepted_since > 0, "and speculation goes on"
    again = await rig.load(cell, ONCE, Seen(), is_over=True)
    assert again.errors == []
    assert again.texts.items() <= undisturbed.texts.items()
    assert again.num_accepted > 0


RESUMED = {("kill", "mid"), ("kill", "before"), ("stop", "mid"), ("cut", "mid")}
"""What a client notices of its coordinator while all of its requests run."""


@dataclass(frozen=True)
class Found:
    """What a fault did.

    Attributes:
        gap_s: as in the cell.
        num_lost: how often a replica of the role was lost, as the coordinator counts it.
        num_accepted_since: draft tokens in chunks since the fault began.
    """

    seen: Seen
    gap_s: float
    num_lost: int
    num_accepted_since: int

    def note(self, cell: Cell) -> None:
        """For `make chaos`."""
        if CHAOS:
            errors = {error.partition(":")[0] for error in self.seen.errors}
            outcome = f"{self.seen.num_done} of {cell.load.num_all} with their text"
            outcome = ", ".join([outcome, *(f"the others with {name}" for name in errors)])
            report.note(
                f"{cell.fault}, {cell.who}, {cell.moment}", outcome, f"longest gap {self.gap_s:.2f} s"
            )


async def disturbed(rig: Rig, cell: Cell) -> Found:
    """The load, with the fault at its moment."""
    lost, seen = await num_lost(rig, cell), Seen()
    async with asyncio.TaskGroup() as tasks:
        with contextlib.ExitStack() as faults, contextlib.ExitStack() as held:
            if cell.moment == "before":
                for verify in rig.fleet.verifies:
                    held.enter_context(stopped(verify))
            if cell.moment != "between":
                loading = tasks.create_task(rig.load(cell, cell.load, seen))
                await until(partial(is_begun, rig, cell, seen))
            victims = await rig.victims(cell)
            accepted, began_s = seen.num_accepted, time.monotonic()
            for index in victims:
                faults.enter_context(rig.fault(cell, index))
            held.close()
            if cell.moment == "between":
                loading = tasks.create_task(rig.load(cell, cell.load, seen))
            await over(rig, cell, victims, loading)
        await loading
    gap_s = time.monotonic() - began_s if cell.error else seen.longest_gap_s
    return Found(seen, gap_s, await num_lost(rig, cell) - lost, seen.num_accepted - accepted)


async def is_begun(rig: Rig, cell: Cell, seen: Seen) -> bool:
    """All requests run: without a token as yet, or well under way."""
    if cell.moment == "before":
        return (await status(rig.address(cell))).num_running == NUM_CLIENTS
    return seen.num_begun >= NUM_CLIENTS and seen.num_chunks >= AT_CHUNK


async def num_lost(rig: Rig, cell: Cell) -> int:
    """How often a replica of the role was lost, as the coordinator of the cell counts it."""
    if cell.role not in ("draft", "verify"):
        return 0
    return sum(one.num_lost for one in seen_as(await status(rig.address(cell)), cell.role))


def check_promise(cell: Cell, seen: Seen, undisturbed: Seen) -> None:
    """The text, or so much of it, and the error."""
    assert [error for error in seen.errors if not (cell.error and re.match(cell.error, error))] == []
    assert seen.texts.items() <= undisturbed.texts.items()
    assert seen.num_done + len(seen.errors) == cell.load.num_all
    assert bool(seen.errors) == bool(cell.error)
    for seed, token_ids in seen.partial.items():
        assert 0 < len(token_ids) < LOAD.num_tokens
        assert token_ids == undisturbed.texts[seed][: len(token_ids)]
