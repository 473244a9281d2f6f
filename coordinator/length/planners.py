"""How many tokens to draft in a stream's next round: the number that promises the most tokens a second.

    rate(γ) = tokens(γ) / time(γ)
    tokens(γ) = 1 + reached_1 + ... + reached_γ     reached_k: probability that k or more are accepted

Acceptance is estimated for each stream's own text (`specwire/proposals/estimate/acceptance.py`); the time of
a round, and the way to decode, are those of all streams (`choice.py`). Only past rounds are used, never a
draft token that is left out.

Pure: no clock, no network. Source of the closed form: Leviathan et al. 2023 (arXiv 2211.17192), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from coordinator.generation import Plan, Planner, Round
from coordinator.length.choice import CHANGE_RATIO, FIRST_LENGTH, Among, Prospects, SharedChoice
from coordinator.length.ways import MAX_CHOSEN, PLAIN, Way
from specwire.core import MAX_TREE_NODES
from specwire.proposals.estimate.acceptance import OwnAcceptance
from specwire.proposals.estimate.rates import best_length

DEFAULT_TREE_NODES = 32
"""Nodes of a tree whose depth alone is given: docs/drafts.md has what 16, 32 and 64 bring."""
_USUAL_WAITS = 2
"""A wait is not too long within so many times the usual one."""
_MOST_PROMPTS = 0.75
"""Most of a round's time that is ascribed to prompts of others, and no fault of its way: sixteen streams that
began together made their first drafted block look four times as slow as the next ones."""


class Length(NamedTuple):
    """The length to draft for a stream's next round; `best` is the one that is best with a wait."""

    best: int
    num_draft_tokens: int
    waits: bool


def choose(tokens: Sequence[float], prospects: Prospects, last: int, *, least: int, prepares: bool) -> Length:
    """The length with the highest rate for a stream.

    Args:
        tokens: [longest + 1] that the stream's next round commits with 0, 1, ... draft tokens.
        last: the best length of its last round.
        least: 1 while the way is on trial, so that something is drafted.
        prepares: whether outcomes are prepared.
    """
    times = prospects.times
    best = best_length(tokens, times, least)
    if least <= last < len(tokens):
        gain = tokens[best] / times[best] * times[last] / tokens[last]
        best = best if gain > CHANGE_RATIO else last
    pays = tokens[best] / times[best] > tokens[0] / times[0]
    if pays or not prepares:
        return Length(best, best, waits=True)
    return Length(best, best_length(tokens, prospects.unwaited, least), waits=False)


def patience_s(num_draft_tokens: int, proposal_ns: float, prospects: Prospects) -> float:
    """Longest worthwhile wait for a proposal, in seconds.

    A proposal saves the time of as many plain rounds as it has accepted tokens. A round that waits as long as
    that beyond the usual wait, and then goes on without, has lost at most twice what was at stake.
    """
    expected = prospects.tokens[num_draft_tokens] - 1
    usual_ns = _USUAL_WAITS * proposal_ns
    return (usual_ns + expected * prospects.plain_ns) / 1e9 if usual_ns else math.inf


class _Observer:
    """Learns from the rounds of one stream."""

    limit: int
    _among: Among
    _last = 0
    _waits = False
    """Whether draft tokens are waited for: a round whose own were late is no plain one."""
    _is_adaptive = False
    """Whether what is believed of the stream's text is read before its next round."""

    def __init__(self, shared: SharedChoice) -> None:
        self._shared = shared
        self._own: OwnAcceptance | None = None
        self._way: Way | None = None
        self._num_rounds = 0  # under this way

    def _enter(self) -> tuple[Way, int]:
        """The way of a round that begins, and how many outcomes are prepared."""
        way, num_outcomes = self._shared.begin_round(self._among)
        self._num_rounds = 1 + self._num_rounds if way == self._way else 1
        self._way = way
        return way, num_outcomes

    def _text(self, num_nodes: int) -> OwnAcceptance:
        """What is believed of the stream's text, for a shape of proposals."""
        shared = self._shared.acceptance(num_nodes)
        if self._own is None:
            self._own = OwnAcceptance(shared)
        self._own.shared = shared
        return self._own

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        way = PLAIN if self._way is None else self._way
        is_learnt, num_steps = self._shared.add(done, way, elapsed_ns), done.num_steps
        # Without draft tokens the text may change, too.
        if (is_learnt and num_steps) or (self._is_adaptive and way.drafts):
            text = self._text(way.num_nodes)
            text.add(num_steps, done.outcome.num_accepted, is_shared=is_learnt)
        # Not its first round: the prompt may be in it, and others may still be under another way. Nor the
        # second, if the target had gone on by itself, and drafts after it.
        is_settled = self._num_rounds > (1 if num_steps or not self._waits else 2)
        if self.limit and is_settled and not done.draft_cost.draft_unavailable:
            load = done.verify_cost.load
            prompts_ns = min(load.prefill_ns, int(_MOST_PROMPTS * elapsed_ns)) if load else 0
            is_plain, took_ns = not (num_steps or self._waits), elapsed_ns - prompts_ns
            self._shared.add_settled(self._among, way, num_steps, len(done.token_ids), took_ns, is_plain)


class FixedLength(_Observer):
    """Always the same length, however long it takes; only whether outcomes are prepared is chosen."""

    def __init__(
        self, num_draft_tokens: int, shared: SharedChoice, max_depth: int = 0, why_plain: str = ""
    ) -> None:
        """Args:
        max_depth: longest path of a tree of so many draft tokens; 0 for chains.
        why_plain: why the length is 0, if it is.
        """
        super().__init__(shared)
        self.limit = min(num_draft_tokens, max_depth) if max_depth else num_draft_tokens
        self._waits = self.limit > 0
        self._among = shared.among_fixed(self.limit, num_draft_tokens if max_depth else 0)
        if num_draft_tokens:
            self._plan = Plan(num_draft_tokens, max_depth=max_depth)
        else:
            self._plan = Plan(0, why_plain=why_plain)

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        num_outcomes = self._enter()[1] if self.limit else 0
        if num_outcomes != self._plan.num_outcomes:
            self._plan = replace(self._plan, num_outcomes=num_outcomes)
        return self._plan


class AdaptiveLength(_Observer):
    """The best length for a stream's text, under the way of all streams."""

    _is_adaptive = True

    def __init__(self, shared: SharedChoice, *, has_trees: bool = False, most: int = MAX_CHOSEN) -> None:
        """Args:
        most: draft tokens one after another.
        """
        super().__init__(shared)
        self.limit = most
        self._among = shared.among(has_trees=has_trees, most=most)
        self._last = 0

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        before = self._way
        way, num_outcomes = self._enter()
        shared, self._waits = self._shared, False
        if way == PLAIN:
            return Plan(0, why_plain=shared.why_not)
        if before is not None and before.num_nodes != way.num_nodes:
            self._last = 0
        prospects = shared.prospects(way)
        if shared.are_known:
            tokens = self._text(way.num_nodes).tokens(min(self.limit, prospects.longest))
            least = int(shared.on_trial(self._among))
            found = choose(tokens, prospects, self._last, least=least, prepares=way.prepares)
        else:
            found = Length(min(FIRST_LENGTH, self.limit), min(FIRST_LENGTH, self.limit), waits=True)
        self._last, length, waits = found
        self._waits = waits and length > 0
        made_for = (length, num_outcomes, waits)
        plan = prospects.plans.get(made_for)
        if plan is None:
            plan = prospects.plans[made_for] = self._planned(way, prospects, *made_for)
        return plan

    def _planned(self, way: Way, prospects: Prospects, length: int, num_outcomes: int, waits: bool) -> Plan:
        if not length:
            return Plan(0, num_outcomes, why_plain=self._shared.why_not)
        proposal_ns = self._shared.costs.proposal_ns(way, length)
        wait_s = patience_s(length, proposal_ns, prospects) if waits else 0.0
        if way.num_nodes:
            return Plan(way.num_nodes, num_outcomes, wait_s, max_depth=length)
        return Plan(length, num_outcomes, wait_s)


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


class SeveralChains:
    """Several chains of draft tokens: as long as a planner says, as many as a verify pass has room for."""

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
