"""How many tokens to draft: the number that promises the most tokens a second, chosen anew in each round.

    tokens(γ) = 1 + reached_1 + ... + reached_γ         reached_k: that at least k are accepted, `forecast.py`
    time(γ)                                             as measured, `measurements.py`

Pure: no clock, no network, and nothing here sees a token. Source of the closed form: Leviathan et al. 2023
(arXiv 2211.17192), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.generation import Plan, Round
from coordinator.length.measurements import MAX_CHOSEN, SharedMeasurements, best_length
from coordinator.length.trials import Settling
from specwire.estimate.forecast import OwnAcceptance

_WORTH_A_CHANGE = 1.02
_HARDLY_PAYS = 0.9
"""What promises less than so many times the tokens of plain decoding is not waited for."""


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
        if self.limit and settled is not None and not done.draft_cost.draft_unavailable:
            num_drafted = min(len(done.proposal.token_ids), MAX_CHOSEN)
            self._shared.add_settled(*settled, num_drafted, elapsed_ns)


class AdaptiveLength:
    """Of one stream: what pays for its text, under the cap of all.

    Where outcomes are prepared and the text is too hard to wait for a proposal, it is asked for all the same,
    and rounds are plain ones until it comes. That costs no time; what is left of a proposal that fits tells
    when the text has become easier.
    """

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
        prospects, tokens = self._shared.prospects(), self._own.tokens(cap)
        least = 1 if self._shared.on_trial else 0
        young_length = self._shared.young_length
        length = self._length = young_length or self._choose(tokens, prospects.round_times, least)
        if not young_length and num_outcomes and not _may_pay(length, tokens, prospects.round_times):
            length = _best(tokens, prospects.unwaited_times, least)
            return Plan(length, num_outcomes, patience_s=0.0)
        return Plan(length, num_outcomes, self._shared.patience_s(length, prospects))

    def _choose(self, tokens: Sequence[float], round_times: Sequence[float], least: int) -> int:
        """The best, or the last one where that is hardly worse: it is what was prepared for."""
        best, last = _best(tokens, round_times, least), self._length
        if least <= last < len(tokens):
            gain = tokens[best] / round_times[best] * round_times[last] / tokens[last]
            return best if gain > _WORTH_A_CHANGE else last
        return best

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        num_drafted = len(done.proposal.token_ids)
        self._own.add(num_drafted, done.outcome.num_accepted)
        self._shared.add(done)
        settled = self._settling.settled
        if settled is not None and not done.draft_cost.draft_unavailable:
            self._shared.add_settled(*settled, num_drafted, elapsed_ns)


def _best(tokens: Sequence[float], times: Sequence[float], least: int) -> int:
    return least + best_length(tokens[least:], times[least:])


def _may_pay(length: int, tokens: Sequence[float], times: Sequence[float]) -> bool:
    return length > 0 and tokens[length] / times[length] > _HARDLY_PAYS * tokens[0] / times[0]
