"""Chains or trees: what brings more tokens a second in a made-up system, and who never gets trees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from coordinator.assembly import planner_of
from coordinator.cost import CallOutcome, Cost
from coordinator.generation import Plan, Planner, Round
from coordinator.length.choice import SharedChoice
from coordinator.length.planners import DEFAULT_TREE_NODES, AdaptiveLength, FixedLength
from coordinator.length.ways import CHAIN, TREES
from specwire.core import Load, Outcome, Proposal, Verdict

ALPHA = 0.7
RUNNER_UP = 0.55


class Machine:
    """Streams that decode in turn on emulated devices; times in nanoseconds.

    A node of a tree has the target's token among its children with a probability that grows with the nodes a
    level has; a chain has it with `ALPHA`.
    """

    def __init__(self, *, token: float, num_streams: int = 1) -> None:
        self.rng = np.random.default_rng(3)
        self.shared = SharedChoice(lambda: num_streams)
        self.streams = [AdaptiveLength(self.shared, has_trees=True) for _ in range(num_streams)]
        self.base, self.token, self.step = 30e6, token, 2e6

    def run(self, num_rounds: int) -> Counter[int]:
        """Rounds by the nodes of their trees."""
        return Counter(self._round(stream) for _ in range(num_rounds) for stream in self.streams)

    def _round(self, stream: AdaptiveLength) -> int:
        plan = stream.plan()
        depth, nodes = plan.num_steps, plan.num_draft_tokens
        width = nodes / depth if plan.max_depth else 1.0
        hit = 1 - (1 - ALPHA) * (1 - RUNNER_UP) ** (width - 1)
        accepted = int(np.argmin([*(self.rng.random(depth) < hit), False]))
        noise = self.rng.lognormal(0, 0.03)
        draft = int(self.step * depth * noise)
        verify = int((self.base + self.token * (nodes + 1)) * noise)
        parents = [*range(-1, depth - 1), *[-1] * (nodes - depth)] if plan.max_depth else []
        done = Round(
            Proposal(0, [0] * nodes, parents=parents),
            Verdict(0, []),
            Outcome(range(accepted), 0),
            Cost(CallOutcome.ASKED, wall_ns=draft, forward_ns=draft, num_prefill_tokens=1),
            Cost(wall_ns=verify, forward_ns=verify, load=Load(0, 1, int(self.base), 0, int(self.token))),
        )
        stream.observe(done, draft + verify)
        return nodes if plan.max_depth else CHAIN


def test_where_tokens_of_a_pass_cost_nothing_there_are_trees() -> None:
    machine = Machine(token=0)
    machine.run(900)
    rounds = machine.run(900)
    assert rounds[CHAIN] < 0.15 * rounds.total()
    assert machine.shared.chosen.num_nodes in TREES


@pytest.mark.parametrize(("token_ns", "is_tree"), [(20_000, True), (12_000_000, False)])
def test_the_first_round_is_a_tree_where_that_promises_more(token_ns: int, is_tree: bool) -> None:
    """Before anything is judged: a tree accepts more than a chain as deep."""
    load = Load(base_ns=30_000_000, token_ns=token_ns, draft_pass_ns=2_000_000, draft_node_ns=20_000)
    shared = SharedChoice(lambda: 1, told=lambda: (load, None))
    assert bool(AdaptiveLength(shared, has_trees=True).plan().max_depth) is is_tree


def test_where_every_token_costs_there_are_chains() -> None:
    """A node costs a fifth of a pass: 16 of them are worth less than they take. Trials are few."""
    machine = Machine(token=6e6)
    machine.run(900)
    rounds = machine.run(900)
    assert rounds[CHAIN] > 0.9 * rounds.total()
    assert machine.shared.chosen.num_nodes == CHAIN


def test_it_turns_to_chains_when_tokens_begin_to_cost() -> None:
    machine = Machine(token=0)
    machine.run(900)
    machine.token = 6e6
    machine.run(2000)
    assert machine.run(600)[CHAIN] > 0.85 * 600


def test_many_streams_agree_on_a_shape() -> None:
    machine = Machine(token=0, num_streams=4)
    machine.run(500)
    rounds = machine.run(300)
    assert rounds[CHAIN] < 0.25 * rounds.total()
    assert rounds.most_common(1)[0][1] > 0.5 * rounds.total()


def test_before_costs_are_known_there_are_chains() -> None:
    shared = SharedChoice(lambda: 1)
    assert AdaptiveLength(shared, has_trees=True).plan().max_depth == 0
    assert shared.chosen.num_nodes == CHAIN


def test_the_first_request_may_fix_a_tree_though_costs_are_known() -> None:
    """As services tell them when a coordinator connects."""
    shared = SharedChoice(lambda: 1, told=lambda: (Load(0, 1, 10**7, 0, 10**5, 10**6, 10**4), None))
    assert FixedLength(32, shared, 8).plan().max_depth == 8
    assert shared.are_known


# --- who plans what ---------------------------------------------------------------------------------


def planner(num_draft_tokens: int | None, max_depth: int | None, *, draft_has_trees: bool = True) -> Planner:
    """The servicer's, for a request that was checked."""
    return planner_of(SharedChoice(lambda: 1), num_draft_tokens, max_depth, has_trees=draft_has_trees)


@pytest.mark.parametrize(
    ("num_draft_tokens", "max_depth", "expected"),
    [
        (5, None, Plan(5)),
        (5, 0, Plan(5)),
        (5, 3, Plan(5, max_depth=3)),
        (None, 3, Plan(DEFAULT_TREE_NODES, max_depth=3)),
        (0, 3, Plan(0)),
    ],
)
def test_what_a_request_fixes_is_planned(
    num_draft_tokens: int | None, max_depth: int | None, expected: Plan
) -> None:
    found = planner(num_draft_tokens, max_depth)
    assert isinstance(found, FixedLength)
    assert found.plan() == expected


def test_streams_under_rejection_choose_among_chains() -> None:
    """Their requests have max_depth 0 (`RequestParser`), and so have those of a target without trees."""
    for chosen, has_trees in (
        (planner(None, 0), False),
        (planner(None, None, draft_has_trees=False), False),
        (planner(None, None), True),
    ):
        assert isinstance(chosen, AdaptiveLength)
        assert any(way.num_nodes for way in chosen._among.ways) is has_trees
