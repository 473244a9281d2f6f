"""Two of each service, and a killer among them: SIGKILL, SIGSTOP and hung devices at random moments.

Every request ends with the text that it would have had, or with a typed error in a run in which all replicas
of verify, or all coordinators, were down at a time; and nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.support import report
from tests.support.effort import sized
from tests.support.fleet import Fleet
from tests.support.processes import wait_until
from tests.support.readers import Load, Seen, run

NUM_RUNS = sized(2, 100)
LOAD = Load(num_clients=4, num_requests=3, num_tokens=80)
ROLES = ("verify", "draft", "coordinator")
_ALLOWED = ("ServiceUnavailableError", "GenerationLostError", "DeadlineExceededError")


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when, in seconds from the start of a run."""

    role: str
    index: int
    kind: str
    at_s: float
    for_s: float

    @classmethod
    def drawn(cls, draws: random.Random) -> Fault:
        role = draws.choice(ROLES)
        kinds = ("kill", "stop") if role == "coordinator" else ("kill", "stop", "hang")
        return cls(
            role, draws.randrange(2), draws.choice(kinds), draws.uniform(0, 1.5), draws.uniform(0.5, 4.0)
        )

    async def happen(self, fleet: Fleet) -> None:
        """And pass: a killed service is started again, after its time."""
        await asyncio.sleep(self.at_s)
        with contextlib.suppress(ProcessLookupError), fleet.disturbed(self.role, self.index, self.kind):
            await asyncio.sleep(self.for_s)


def all_down(faults: list[Fault]) -> bool:
    """Whether both of verify, or both coordinators, may have been down at a time. A restart takes seconds."""
    victims = {(fault.role, fault.index) for fault in faults}
    return any({(role, 0), (role, 1)} <= victims for role in ("verify", "coordinator"))


async def disturbed(fleet: Fleet, draws: random.Random, undisturbed: Seen) -> Seen:
    """One run, up to the last service that serves again."""
    faults = [Fault.drawn(draws) for _ in range(draws.randint(1, 3))]
    # A victim of several is one of the first of them: it is down already.
    faults = list({(fault.role, fault.index): fault for fault in reversed(faults)}.values())
    seen = Seen()
    await asyncio.gather(run(fleet.address, LOAD, seen), *(fault.happen(fleet) for fault in faults))
    await fleet.complete()
    wrong = [error for error in seen.errors if not (all_down(faults) and error.startswith(_ALLOWED))]
    assert not wrong, faults
    assert seen.texts.items() <= undisturbed.texts.items(), faults
    return seen


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_killer() -> None:
    draws, ends = random.Random(1), Counter[str]()
    fleet = Fleet(num_coordinators=2, failover_timeout_s=20)
    try:

        async def all_runs() -> None:
            undisturbed = await run(fleet.address, LOAD)
            assert not undisturbed.errors
            for _ in range(NUM_RUNS):
                seen = await disturbed(fleet, draws, undisturbed)
                ends["identical"] += seen.num_done
                ends.update(error.partition(":")[0] for error in seen.errors)
                await asyncio.to_thread(wait_until, lambda: not fleet.num_held(), 30)

        asyncio.run(all_runs())
    finally:
        fleet.close()
    assert ends["identical"] > 0.8 * ends.total()
    outcome = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    report.note(f"{NUM_RUNS} runs with a killer, two of each service", outcome, "0 wrong, nothing held")
