"""Several chains of draft tokens instead of one, for a planner that knows of one. Pure."""

from __future__ import annotations

from dataclasses import replace

from coordinator.generation import Plan, Planner, Round
from specwire.core import MAX_TREE_NODES


class SeveralChains:
    """As long as a planner says, and as many as there is room for in a verify pass."""

    def __init__(self, planner: Planner, num_chains: int) -> None:
        """Args:
        planner: its measurements are of rounds with so many chains.
        num_chains: most of a round.
        """
        self._planner = planner
        self._num_chains = num_chains
        self.limit = planner.limit

    def plan(self) -> Plan:
        """See `generation.Planner`. Nothing is prepared, for a round has too many outcomes."""
        plan = self._planner.plan()
        num_chains = min(self._num_chains, MAX_TREE_NODES // max(1, plan.num_draft_tokens))
        return replace(plan, num_chains=num_chains, num_outcomes=0)

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        self._planner.observe(done, elapsed_ns)
