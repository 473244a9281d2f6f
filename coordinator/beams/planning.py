"""How much to draft after live beams: what promises the most steps a second, by what rounds have cost.

    time of a step without drafts = pass(nodes)
    time of a step with drafts    = (draft(tokens) + pass(nodes + tokens)) / steps + opening / steps left

Costs are fitted to the rounds of all searches of a coordinator, and the steps of a round are averaged over
those of equal width: so a search that begins knows what to expect, and few rounds are trials. Pure: no clock,
no network.
"""

from __future__ import annotations

from typing import NamedTuple

from coordinator.generation import Plan, Round
from specwire.proposals.estimate.costs import CostModel
from specwire.proposals.estimate.rates import Mean

_DEFAULT_TOKENS = 6
"""Draft tokens after each live beam, where the request fixes none."""
_DEFAULT_DEPTH = 3
_FIRST_SHARE = 1 / 3
"""Steps that draft tokens save, as a share of their depth, before any were judged: 2 steps a round, about as
measured with the embedded pair."""
_RATE, _FIRST_ROUNDS = 0.1, 3
"""Learning rate of that share, and how many rounds the first value counts for."""
_GAIN = 1.03
"""Times the speed of rounds without drafts that those with drafts have to promise."""
_LEAST_ROUNDS = 2
"""With drafts, of a search that has any: the first one opens the draft, and tells little about the others."""
_TRIAL_COST = 0.01
"""Share of all time that trials of what promises less may cost."""
_DOES_NOT_PAY = "does not pay here: drafts for all beams take longer than the steps that they save"


class Size(NamedTuple):
    """What a round without draft tokens runs."""

    num_beams: int
    num_trees: int
    num_nodes: int  # of all trees, leading to live beams
    length: int  # of the texts of live beams, with the prompt
    num_left: int  # steps, at most

    @property
    def num_tokens(self) -> int:
        """Of the pass: each tree hangs below at least one token that is run."""
        return self.num_nodes + self.num_trees


class SharedBeamCosts:
    """What all searches of a coordinator learn together. Times in nanoseconds."""

    def __init__(self) -> None:
        self._passes = CostModel(2)  # by number of tokens run and of trees; all of a round but its drafts
        self._drafts = CostModel(3)  # by depth, number of draft tokens, tokens that the draft has to be sent
        self._openings = CostModel(1)  # by the last of these: the first drafts of a search
        self._token_ns = 0.0  # of a pass, as the target reports it
        self._saved: dict[tuple[int, int], Mean] = {}  # steps saved, of the depth: by number of beams, depth
        self._spent_ns = self._lost_ns = 0.0

    def prefers_drafts(self, size: Size, plan: Plan, num_known: int) -> bool:
        """Whether to draft: what takes less time a step, or now and then the other.

        Args:
            plan: of the draft tokens after each beam.
            num_known: tokens of each beam that the draft was sent; 0 before the first drafts of a search.
        """
        plain_ns = self._pass_ns(size, 0)
        if not plain_ns:
            return False
        is_known = bool(self._drafts.base or any(self._drafts.rates))
        num_steps = 1 + self._saved_share(size, plan).value * plan.num_steps
        num_drafted = size.num_beams * plan.num_draft_tokens
        num_new = size.length - num_known if num_known else num_steps
        draft_ns = self._drafts.predict((plan.num_steps, num_drafted, size.num_beams * num_new))
        draft_ns = draft_ns if is_known else plain_ns
        opening_ns = 0.0 if num_known else self._openings.predict((size.num_beams * size.length,))
        opening_ns = max(0.0, opening_ns - draft_ns)
        round_ns = draft_ns + self._pass_ns(size, num_drafted)
        is_faster = _GAIN * round_ns / num_steps + opening_ns / size.num_left < plain_ns
        if is_faster:
            loss_ns = plain_ns - round_ns / num_steps
        else:
            num_rounds = 1 if num_known else _LEAST_ROUNDS
            loss_ns = opening_ns + num_rounds * (round_ns - num_steps * plain_ns)
        return is_faster is not self._may_lose(max(0.0, loss_ns))

    def add_pass(self, size: Size, done: Round, elapsed_ns: int) -> None:
        """A round of any search, with or without draft tokens."""
        self._spent_ns += elapsed_ns
        num_tokens = size.num_tokens + len(done.proposal.token_ids)
        pass_ns, load = elapsed_ns - done.draft_cost.wall_ns, done.verify_cost.load
        self._token_ns = load.token_ns if load is not None else self._token_ns
        self._passes.add((num_tokens, size.num_trees), max(1, pass_ns))

    def add_drafts(self, size: Size, plan: Plan, num_known: int, wall_ns: int) -> None:
        """What was drafted in a round after each beam, as the plan says, took so long."""
        num_drafted = size.num_beams * plan.num_draft_tokens
        num_missing = size.num_beams * (size.length - num_known)
        if num_known:
            self._drafts.add((plan.num_steps, num_drafted, num_missing), max(1, wall_ns))
        else:
            self._openings.add((num_missing,), max(1, wall_ns))

    def add_saved(self, size: Size, plan: Plan, num_accepted: int) -> None:
        """Drafts of the usual number have saved so many steps."""
        self._saved_share(size, plan).add(num_accepted / plan.num_steps)

    def _pass_ns(self, size: Size, num_drafted: int) -> float:
        """All of a round but its drafts; 0 before the first one. Until rounds of several sizes tell what a
        token costs, it is as the target says."""
        token_ns = self._passes.rates[0] or self._token_ns
        return self._passes.predict((size.num_tokens, size.num_trees)) + token_ns * num_drafted

    def _saved_share(self, size: Size, plan: Plan) -> Mean:
        """It begins as that of the width that is the most alike."""
        key = size.num_beams, plan.num_steps
        if key not in self._saved:
            nearest = min(self._saved, key=lambda other: abs(other[0] - size.num_beams), default=None)
            first = self._saved[nearest].value if nearest else _FIRST_SHARE
            self._saved[key] = Mean(first, num_rounds=_FIRST_ROUNDS, least_rate=_RATE)
        return self._saved[key]

    def _may_lose(self, loss_ns: float) -> bool:
        """Whether a trial that is expected to cost so much is due; it is counted then."""
        if self._lost_ns + loss_ns > _TRIAL_COST * self._spent_ns:
            return False
        self._lost_ns += loss_ns
        return True


class BeamPlanner:
    """How much to draft after each live beam of one search: nothing where that promises less.

    What a request or a server fixes is drafted in any case.
    """

    def __init__(
        self,
        num_draft_tokens: int | None,
        max_depth: int | None,
        shared: SharedBeamCosts,
        *,
        why_plain: str = "",
    ) -> None:
        """Args:
        num_draft_tokens: after each beam; None to choose.
        max_depth: of the tree of these; 0 for chains, None to choose.
        why_plain: why there are to be no draft tokens, if so.
        """
        self._why_plain = why_plain
        self._is_fixed = num_draft_tokens is not None
        self._num_tokens = _DEFAULT_TOKENS if num_draft_tokens is None else num_draft_tokens
        depth = _DEFAULT_DEPTH if max_depth is None else max_depth
        self._max_depth = min(depth, self._num_tokens)
        if not self._max_depth and not self._is_fixed:
            self._num_tokens = _DEFAULT_DEPTH  # a chain
        self._shared = shared
        self._size: Size | None = None  # of the round that is planned
        self._plan = Plan(0)
        self._num_rounds = self._num_drafts = 0
        self._num_known = 0  # tokens of each beam that the draft was sent

    def plan(self, size: Size, room: int) -> Plan:
        """For the next round, with room for so many draft tokens of each beam."""
        self._size, self._plan = size, self._shape(min(self._num_tokens, room), size.num_left - 1)
        if self._plan.num_draft_tokens and not self._is_fixed and not self._pays(size):
            self._plan = Plan(0, why_plain=_DOES_NOT_PAY)
        return self._plan

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """Learn from the planned round; not what the first pass costs, which runs the prompt."""
        size, plan = self._size, self._plan
        assert size is not None
        self._num_rounds += 1
        if self._num_rounds > 1:
            self._shared.add_pass(size, done, elapsed_ns)
        if not plan.num_draft_tokens or done.draft_cost.draft_unavailable:
            return
        if done.draft_cost.outcome is not None:  # none was asked while an earlier answer is late
            self._shared.add_drafts(size, plan, self._num_known, done.draft_cost.wall_ns)
        self._num_known, self._num_drafts = size.length, self._num_drafts + 1
        if not self._is_fixed:
            self._shared.add_saved(size, plan, done.outcome.num_accepted)

    def _shape(self, num_tokens: int, most: int) -> Plan:
        if num_tokens <= 0 or most <= 0:
            return Plan(0, why_plain="" if self._num_tokens else self._why_plain)
        if not self._max_depth:
            return Plan(min(num_tokens, most))
        return Plan(num_tokens, max_depth=min(self._max_depth, num_tokens, most))

    def _pays(self, size: Size) -> bool:
        """One beam, which a search begins with, is followed by more beams than draft tokens could be."""
        if 0 < self._num_drafts < _LEAST_ROUNDS:
            return True
        return self._num_rounds > 0 and self._shared.prefers_drafts(size, self._plan, self._num_known)
