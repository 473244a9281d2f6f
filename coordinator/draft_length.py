"""How many tokens to draft: the number that promises the most tokens a second, chosen anew in each round.

    tokens(γ) = 1 + reached_1 + ... + reached_γ         reached_k: that at least k are accepted, `forecast.py`
    time(γ)                                             as measured, `measurements.py`

Pure: no clock, no network, and nothing here sees a token. Source of the closed form: Leviathan et al. 2023
(arXiv 2211.17192), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.generation import Plan, Round
from coordinator.measurements import MAX_CHOSEN, SharedMeasurements, best_length
from coordinator.trials import Settling
from specwire.forecast import OwnAcceptance

_WORTH_A_CHANGE = 1.02


class FixedLength:
    """Always the same, as long as it takes; only whether outcomes are prepared follows what pays."""

    def __init__(self, num_draft_tokens: int, shared: SharedMeasurements) -> None:
        self.limit = num_draft_tokens
        self._shared = shared
        self._own = OwnAcceptance(shared.acceptance)
        self._settling = Settling()

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        num_outcomes = self._shared.num_outcomes if self.limit else 0
        self._settling.enter(None, num_outcomes)
        return Plan(self.limit, num_outcomes)

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        self._own.add(len(done.proposal.token_ids), done.outcome.num_accepted)
        self._shared.add(done)
        settled = self._settling.settled
        if self.limit and settled is not None:
            num_drafted = min(len(done.proposal.token_ids), MAX_CHOSEN)
            self._shared.add_settled(*settled, num_drafted, elapsed_ns)


class AdaptiveLength:
    """Of one stream: what pays for its text, under the cap of all."""

    limit = MAX_CHOSEN

    def __init__(self, shared: SharedMeasurements) -> None:
        self._shared = shared
        self._own = OwnAcceptance(shared.acceptance)
        self._settling = Settling()
        self._length = 0

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        cap, num_outcomes = self._shared.cap, self._shared.num_outcomes
        self._settling.enter(cap, num_outcomes)
        if cap == 0:
            return Plan(0)
        prospects = self._shared.prospects()
        self._length = self._shared.young_length or self._choose(cap, prospects.round_times)
        return Plan(self._length, num_outcomes, self._shared.patience_s(self._length, prospects))

    def _choose(self, cap: int, round_times: Sequence[float]) -> int:
        """The best, or the last one where that is hardly worse: it is what was prepared for."""
        tokens = self._own.tokens(cap)
        least = 1 if self._shared.on_trial else 0
        best = least + best_length(tokens[least:], round_times[least:])
        last = self._length
        if least <= last <= cap:
            gain = tokens[best] / round_times[best] * round_times[last] / tokens[last]
            return best if gain > _WORTH_A_CHANGE else last
        return best

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        num_drafted = len(done.proposal.token_ids)
        self._own.add(num_drafted, done.outcome.num_accepted)
        self._shared.add(done)
        settled = self._settling.settled
        if settled is not None:
            self._shared.add_settled(*settled, num_drafted, elapsed_ns)
