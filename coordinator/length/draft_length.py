"""How many tokens to draft: the number that promises the most tokens a second, chosen anew in each round.

    rate(γ) = tokens(γ) / time(γ)
    tokens(γ) = 1 + reached_1 + ... + reached_γ     reached_k: probability that k or more are accepted

Acceptance is estimated by position over all streams, and for each stream's own text (`forecast.py`). The time
of a round is modelled from measured costs (`round_costs.py`) and scaled to measured rounds. A new coordinator
warms up with fixed lengths. Afterwards each stream takes the length with the highest rate, or keeps its last
one where that is hardly worse, up to a cap. The cap, and whether outcomes are prepared, hold for all streams:
trials find what brings the most tokens a second, at a cost of about one per cent (`trials.py`). Where no
length pays for its wait and outcomes are prepared, the draft is asked without waiting. Only past rounds are
used, never a draft token that is left out.

Pure: no clock, no network. Source of the closed form: Leviathan et al. 2023 (arXiv 2211.17192), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from coordinator.generation import Plan, Planner, Round
from coordinator.length.measurements import MAX_CHOSEN, Options, Prospects, SharedMeasurements
from coordinator.length.trials import Settling
from specwire.estimate.forecast import OwnAcceptance
from specwire.estimate.rates import best_length

_CHANGE_RATIO = 1.02
"""A length replaces the stream's last one when it promises so many times its rate: outcomes were prepared for
the last one."""
_WAIT_RATIO = 0.9
"""A proposal is waited for if it promises at least so many times the rate of plain decoding."""
DEFAULT_TREE_NODES = 32
"""Nodes of a tree whose depth alone is given: docs/drafts.md has what 16, 32 and 64 bring."""
_USUAL_WAITS = 2
"""A wait is not too long within so many times the usual one."""


class Choice(NamedTuple):
    """The length to draft for a stream's next round; `best` is the one that is best with a wait."""

    best: int
    num_draft_tokens: int
    waits: bool


def choose(tokens: Sequence[float], prospects: Prospects, options: Options, last: int) -> Choice:
    """The length with the highest rate for a stream.

    Args:
        tokens: [options.cap + 1] that the stream's next round commits with 0, 1, ... draft tokens.
        last: the best length of its last round.
    """
    times, least = prospects.round_times, options.min_length
    best = best_length(tokens, times, least)
    if least <= last < len(tokens):
        gain = tokens[best] / times[best] * times[last] / tokens[last]
        best = best if gain > _CHANGE_RATIO else last
    pays = best > 0 and tokens[best] / times[best] > _WAIT_RATIO * tokens[0] / times[0]
    if pays or not options.num_outcomes:
        return Choice(best, best, waits=True)
    return Choice(best, best_length(tokens, prospects.unwaited_times, least), waits=False)


def patience_s(num_draft_tokens: int, proposal_ns: float, prospects: Prospects) -> float:
    """Longest worthwhile wait for a proposal, in seconds.

    A proposal saves the time of as many plain rounds as it has accepted tokens. A round that waits as long as
    that beyond the usual wait, and then goes on without, has lost at most twice what was at stake.
    """
    expected = prospects.tokens[num_draft_tokens] - 1
    usual_ns = _USUAL_WAITS * proposal_ns
    return (usual_ns + expected * prospects.round_times[0]) / 1e9 if usual_ns else math.inf


class _Observer:
    """Learns from the rounds of one stream."""

    limit: int
    _is_adaptive = False
    """Whether what is believed of the stream's text is read before its next round."""

    def __init__(self, shared: SharedMeasurements) -> None:
        self._shared = shared
        self._own = OwnAcceptance(shared.acceptance)
        self._settling = Settling()

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        self.learn(done, elapsed_ns, may_try=True)

    def learn(self, done: Round, elapsed_ns: int, *, may_try: bool) -> None:
        """As `observe`; the round counts in trials where `may_try`."""
        if self._is_adaptive or self._shared.learns_next:
            self._own.add(done.num_steps, done.outcome.num_accepted)
        self._shared.add(done)
        settled = self._settling.settled
        if not may_try or settled is None or done.draft_cost.draft_unavailable:
            return
        if self.limit:
            self._shared.add_settled(*settled, min(done.num_steps, MAX_CHOSEN), elapsed_ns)


class FixedLength(_Observer):
    """Always the same length, however long it takes; only whether outcomes are prepared is chosen."""

    def __init__(
        self, num_draft_tokens: int, shared: SharedMeasurements, max_depth: int = 0, why_plain: str = ""
    ) -> None:
        """Args:
        max_depth: longest path of a tree of so many draft tokens; 0 for chains.
        why_plain: why the length is 0, if it is.
        """
        super().__init__(shared)
        self.limit = min(num_draft_tokens, max_depth) if max_depth else num_draft_tokens
        if num_draft_tokens:
            self._plan = Plan(num_draft_tokens, max_depth=max_depth)
        else:
            self._plan = Plan(0, why_plain=why_plain)

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        num_outcomes = self._shared.begin_round().num_outcomes if self.limit else 0
        self._settling.enter(None, num_outcomes)
        if num_outcomes != self._plan.num_outcomes:
            self._plan = replace(self._plan, num_outcomes=num_outcomes)
        return self._plan


class WithText:
    """A planner for a draft model, or for none, beside drafts from the text itself.

    What such rounds accept and cost says nothing about the model, which does not learn from them.
    """

    def __init__(self, planner: Planner, num_text_tokens: int) -> None:
        """Args:
        num_text_tokens: most draft tokens of a proposal from the text.
        """
        self._planner = planner
        self._num_text_tokens = num_text_tokens
        self.limit = max(planner.limit, num_text_tokens)

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        return replace(self._planner.plan(), num_text_tokens=self._num_text_tokens)

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        if not done.is_from_text:
            self._planner.observe(done, elapsed_ns)


class AdaptiveLength(_Observer):
    """The best length for a stream's text, under the cap of all streams."""

    limit = MAX_CHOSEN
    _is_adaptive = True

    def __init__(self, shared: SharedMeasurements) -> None:
        super().__init__(shared)
        self._last = 0

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        options = self._shared.begin_round()
        self._settling.enter(options.cap, options.num_outcomes)
        if options.cap == 0:
            return Plan(0, why_plain=self._shared.why_not)
        prospects = self._shared.refresh()
        if warmup := options.warmup_length:
            choice = Choice(warmup, warmup, waits=True)
        else:
            choice = choose(self._own.tokens(options.cap), prospects, options, self._last)
        self._last, length, waits = choice
        if not length:
            return Plan(0, options.num_outcomes, why_plain=self._shared.why_not)
        if not waits:
            return Plan(length, options.num_outcomes, patience_s=0.0)
        proposal_ns = self._shared.costs.proposal_ns(length)
        return Plan(length, options.num_outcomes, patience_s(length, proposal_ns, prospects))
