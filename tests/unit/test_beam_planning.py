"""How much is drafted after live beams, with simulated costs: never much slower than without a draft."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from coordinator.beams.planning import BeamPlanner, SharedBeamCosts, Size
from coordinator.cost import CallOutcome, Cost
from coordinator.generation import Plan, Round
from specwire.core import Load, Outcome, Proposal, Verdict

PROMPT_LEN, MAX_TOKENS, NUM_BEAMS = 40, 24, 8


@dataclass(frozen=True)
class Machine:
    """What rounds cost, in nanoseconds, and save.

    Attributes:
        saved: the share of draft tokens' depth that takes no pass, on average.
    """

    base: float = 4e6
    token: float = 1e5
    draft_base: float = 3e6
    draft_token: float = 5e4
    prefill: float = 2e4
    saved: float = 0.3
    noise: float = 0.1

    def plain_ns(self, size: Size) -> float:
        return self.base + self.token * size.num_tokens

    def round_of(self, size: Size, plan: Plan, num_prefill: int, rng: random.Random) -> tuple[Round, int]:
        """A round and its time."""
        num_drafted = size.num_beams * plan.num_draft_tokens
        draft_ns = self.draft_base + self.draft_token * num_drafted + self.prefill * num_prefill
        factor = rng.lognormvariate(0, self.noise)
        draft_ns = factor * draft_ns if num_drafted else 0.0
        pass_ns = factor * (self.plain_ns(size) + self.token * num_drafted)
        asked = CallOutcome.ASKED if num_drafted else None
        cost = Cost(outcome=asked, wall_ns=int(draft_ns), num_prefill_tokens=num_prefill)
        num_saved = sum(rng.random() < self.saved for _ in range(plan.num_steps))
        done = Round(
            Proposal(size.length, [0] * num_drafted),
            Verdict(size.length, []),
            Outcome(range(min(num_saved, size.num_left - 1)), -1),
            cost,
            Cost(load=Load(base_ns=int(self.base), token_ns=int(self.token))),
        )
        return done, int(draft_ns + pass_ns)


def searched(machine: Machine, planner: BeamPlanner, rng: random.Random) -> tuple[float, float, int]:
    """The time of a search, that of the same one without a draft, and how many rounds drafted."""
    length, known_len, total_ns, plain_ns, drafted = 0, 0, 0.0, 0.0, 0
    while length < MAX_TOKENS:
        num_beams = NUM_BEAMS if length else 1
        num_nodes = 0 if num_beams == 1 else rng.randint(NUM_BEAMS, 24)
        size = Size(num_beams, 1, num_nodes, PROMPT_LEN + length, MAX_TOKENS - length)
        plan = planner.plan(size, room=5)
        num_prefill = 0
        if plan.num_draft_tokens:
            num_prefill, known_len = num_beams * (size.length - known_len + 1), size.length
        done, elapsed_ns = machine.round_of(size, plan, num_prefill, rng)
        planner.observe(done, elapsed_ns)
        num_steps = 1 + done.outcome.num_accepted
        total_ns += elapsed_ns
        plain_ns += num_steps * machine.plain_ns(size)
        drafted += plan.num_draft_tokens > 0
        length += num_steps
    return total_ns, plain_ns, drafted


def ratio(machine: Machine, shared: SharedBeamCosts, num_searches: int, seed: int = 1) -> tuple[float, int]:
    """Speed of so many searches over that without a draft, and how many rounds drafted."""
    rng = random.Random(seed)
    done = [searched(machine, BeamPlanner(None, None, shared), rng) for _ in range(num_searches)]
    total_ns, plain_ns, drafted = (sum(column) for column in zip(*done, strict=True))
    return plain_ns / total_ns, int(drafted)


CPU = Machine(saved=0.2)
"""A pass costs by the token: 40 draft tokens double it, for 1.6 steps."""
GPU = Machine(token=1e3, base=2e7)
"""Wide passes cost as much as narrow ones."""
FAR = Machine(token=1e3, draft_base=5e7)
"""A proposal takes as long as ten passes."""


@pytest.mark.parametrize("machine", [CPU, FAR], ids=["cpu", "far"])
def test_drafts_that_do_not_pay_cost_nothing(machine: Machine) -> None:
    """The searches after the first one of a process have 0.98 of the speed without a draft, its noise apart;
    drafts are tried again now and then."""
    shared = SharedBeamCosts()
    ratio(machine, shared, 1)
    quiet = Machine(**{**vars(machine), "noise": 0.0})
    speed, drafted = ratio(quiet, shared, 200)
    assert speed >= 0.98
    assert 0 < drafted < 100


def test_a_first_search_pays_no_trial() -> None:
    """What a wide pass costs is as the target says, and a draft that is not known yet as much as a pass: so
    the first trial waits until it is one per cent of all rounds."""
    shared = SharedBeamCosts()
    nums = [ratio(CPU, shared, 1, seed)[1] for seed in range(40)]
    assert nums[0] == 0
    assert sum(nums) > 0


def test_drafts_that_pay_are_used() -> None:
    """From the first search on, and in almost every round."""
    speed, drafted = ratio(GPU, SharedBeamCosts(), 20)
    assert speed > 1.25
    assert drafted > 20 * 8


@pytest.mark.parametrize(
    ("before", "after"), [(GPU, CPU), (CPU, GPU), (FAR, GPU)], ids=["worse", "better", "nearer"]
)
def test_what_changes_is_noticed(before: Machine, after: Machine) -> None:
    """As when other work comes to the machine, or leaves it."""
    shared = SharedBeamCosts()
    ratio(before, shared, 50)
    ratio(after, shared, 150)
    speed, _ = ratio(after, shared, 50)
    assert speed > (1.2 if after is GPU else 0.95)


def test_opening_the_draft_pays_only_with_steps_left() -> None:
    """A long prompt that the draft has not seen, and a search that is nearly over."""
    shared, machine = SharedBeamCosts(), Machine(token=1e3, prefill=2e5, base=2e7)
    for seed in range(10):
        ratio(machine, shared, 1, seed)
    plan = Plan(5, max_depth=3)
    early, late = (Size(NUM_BEAMS, 1, 16, 1000, left) for left in (400, 3))

    def share(size: Size, num_known: int) -> float:
        return sum(shared.prefers_drafts(size, plan, num_known) for _ in range(100)) / 100

    assert share(early, 0) > 0.8, "but for trials"
    assert share(late, 0) < 0.2
    assert share(late, 998) > 0.8


def test_what_a_request_fixes_is_drafted() -> None:
    """However slow it is."""
    shared = SharedBeamCosts()
    ratio(FAR, shared, 5)
    planner = BeamPlanner(5, 0, shared)
    for left in range(20, 10, -1):
        size = Size(NUM_BEAMS, 1, 10, 100, left)
        plan = planner.plan(size, room=6)
        assert plan == Plan(5)
        planner.observe(*FAR.round_of(size, plan, 8, random.Random(0)))
