"""What all streams of a coordinator learn together, and the options that hold for all of them.

After a warm-up with lengths in turns, the modelled times of rounds (`round_costs.py`) are scaled to the
measured ones. How much all streams may draft, and whether outcomes are prepared, is left to trials
(`trials.py`): the model says where to begin and what is hardly worth one. Pure: no clock, no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from coordinator.generation import Round
from coordinator.length.round_costs import RoundCosts
from coordinator.length.trials import Level, Rate, Trials
from specwire.estimate.forecast import SharedAcceptance
from specwire.estimate.rates import best_length

CAPS = (0, 2, 4, 8, 16)
MIN_FIRST_CAP = 4
"""Least cap to begin trials with: what the network costs may be hidden by preparing outcomes."""
MAX_CHOSEN = CAPS[-1]
"""Most draft tokens a round that are ever chosen."""
MAX_OUTCOMES = 32
"""Outcomes that are prepared for where that pays."""

ADOPT_RATIO, KEEP_RATIO = 1.03, 0.99
"""A larger cap is adopted for 3 % more tokens, and kept down to 1 % less: on hard text all caps are alike."""
KEEP_RATIO_SLOW_DRAFT = 0.9
"""Where a proposal takes longer than a pass, outcomes are prepared until that is clearly worse: without them
every round waits."""

WARMUP_LENGTHS = (2, 8)
"""Draft tokens of the first proposals, in turns: the costs of one length tell nothing of another."""
_WARMUP_PROPOSALS, _WARMUP_PROPOSALS_SLOW_DRAFT = 12, 4
"""Proposals of the warm-up; or of each stream, if that is less, where a proposal takes longer than a pass:
more is learnt from those that are requested without waiting."""
_SLOW_SHARE = 0.25
"""A draft is slow when a proposal that was not prepared takes this share of a pass.

Measured with the embedded pair: rejection sampling commits 1.08 times the tokens of Gumbel coupling, but 0.46
of its proposals were prepared, and 0.86 under Gumbel coupling. With a wait of w passes for all others,
(1 + 0.54 w) / (1 + 0.14 w) is over 1.08 from w = 0.2 on.
"""
_LEAST_SHARE = 0.05
"""A proposal that takes less than this share of a pass, such as the target's own, is not named as a cost."""
_OWN = ("_num_streams", "_may_prepare", "_chains", "follows")
"""What a process does not export."""
_REFRESH_ROUNDS = 8
"""Rounds between two updates of the prospects, which all streams read in every round; with more than 32
streams, a quarter of them."""
_LEARNT_ROUNDS = 32
"""Costs are learnt from so many rounds while each stream has one: what a pass costs is alike for all."""


class Prospects(NamedTuple):
    """What rounds promise to an average stream: each [MAX_CHOSEN + 1], by number of draft tokens."""

    tokens: list[float]  # that a round commits
    round_times: list[float]  # nanoseconds
    unwaited_times: list[float]  # of rounds that do not wait for their proposals, scaled alike

    def best_rate(self, cap: int) -> float:
        """Tokens a nanosecond with at most `cap` draft tokens, and at least one unless it is 0."""
        return max(self.tokens[n] / self.round_times[n] for n in range(min(1, cap), cap + 1))


class Options(NamedTuple):
    """What holds for the rounds of all streams that begin now."""

    cap: int  # most draft tokens
    num_outcomes: int  # to prepare for
    min_length: int = 0  # 1 while the cap is on trial, so that something is drafted
    warmup_length: int | None = None  # None once costs and acceptance are known


class Chosen(NamedTuple):
    """The latest choices, for metrics: mean length of rounds that drafted, trials of both kinds so far."""

    num_draft_tokens: float
    cap: int
    num_outcomes: int
    num_trials: int


class SharedMeasurements:
    """Learns from the rounds of all streams of a coordinator. Times in nanoseconds.

    Attributes:
        is_warming_up: whether costs and acceptance are not known well enough to choose by.
        follows: whether another process learns and chooses, and this one adopts that.
        why_not: the case against drafting by the latest figures, for rounds that are planned without.

    Args:
        num_streams: that run now.
        num_outcomes: to prepare for; None finds out what pays.
        may_prepare: whether any may be prepared for at present.
        num_nodes: of a tree, whose depth is meant by draft tokens here; 0 for chains.
        chains: for trees, the measurements of chains. As many outcomes are prepared at first as for them.
        num_chains: of a round, whose length is meant then.
    """

    def __init__(
        self,
        num_streams: Callable[[], int],
        *,
        num_outcomes: int | None = 0,
        may_prepare: Callable[[], bool] = lambda: True,
        num_nodes: int = 0,
        chains: SharedMeasurements | None = None,
        num_chains: int = 1,
    ) -> None:
        self.acceptance, self.costs = SharedAcceptance(), RoundCosts(num_nodes, num_chains)
        self._num_streams, self._may_prepare, self._chains = num_streams, may_prepare, chains
        self._outcome_options = (0, MAX_OUTCOMES) if num_outcomes is None else (num_outcomes,)
        self._caps = Trials(CAPS, MIN_FIRST_CAP)
        self._outcomes = Trials(self._outcome_options, self._outcome_options[0])
        self._warmup = Rate()
        self._knows_outcomes = len(self._outcome_options) == 1
        self.is_warming_up, self.follows = True, False
        self._num_rounds = self._num_proposals = self._refresh_at = self._learn_at = 0
        self._entered: tuple[int, Level, Level] | None = None
        self._prospects: Prospects
        self._expected: dict[int, float]  # rate by cap
        self.why_not = ""

    def begin_round(self) -> Options:
        """Options for a round of any stream."""
        if self.is_warming_up:
            length = WARMUP_LENGTHS[self._num_proposals % len(WARMUP_LENGTHS)]
            return Options(WARMUP_LENGTHS[-1], self.num_outcomes, warmup_length=length)
        _, caps, outcomes = self._levels()
        num_outcomes = outcomes.option if self._may_prepare() else 0
        return Options(caps.option, num_outcomes, min_length=int(caps.on_trial))

    def refresh(self) -> Prospects:
        """The prospects, updated if there were enough rounds since the last time."""
        if self._num_rounds >= self._refresh_at:
            usual = max(_REFRESH_ROUNDS, self._num_streams() // 4)
            self._refresh_at = self._num_rounds + min(usual, 1 + self._num_rounds // 2)
            round_times = self._round_times()
            unwaited = self.costs.unwaited_times(MAX_CHOSEN)
            scale = round_times[0] / unwaited[0]
            self._prospects = Prospects(
                self.acceptance.tokens(), round_times, [scale * time for time in unwaited]
            )
            self._expected = {cap: self._prospects.best_rate(cap) for cap in CAPS}
            self.why_not = self._reason()
        return self._prospects

    @property
    def learns_next(self) -> bool:
        """Whether costs are learnt from the next round that is added."""
        return self.is_warming_up or self._num_rounds + 1 >= self._learn_at

    def add(self, done: Round) -> None:
        """Count a round of any stream, and learn from it if its turn has come."""
        if self.follows:
            return
        is_learnt = self.learns_next
        self._num_rounds += 1
        self._num_proposals += bool(done.proposal.token_ids)
        if not is_learnt:
            return
        # An odd number: not the rounds of the same streams each time.
        self._learn_at = self._num_rounds + (self._num_streams() // _LEARNT_ROUNDS | 1)
        self.costs.add(done, prepares=self.num_outcomes > 0)
        if self.is_warming_up:
            self._outcomes.first = self._first_outcomes()
            self._end_warmup()

    def add_settled(self, cap: int | None, num_outcomes: int, num_drafted: int, elapsed_ns: int) -> None:
        """A round of a settled stream, and its time: under the shared cap, or None for a fixed length."""
        may_prepare = self._may_prepare()
        has_no_choice = cap is None and (len(self._outcome_options) == 1 or not may_prepare)
        if self.follows or has_no_choice:
            return
        if self.is_warming_up:
            self._warmup.add(num_drafted, elapsed_ns, _WARMUP_PROPOSALS)
            return
        num_streams, caps, outcomes = self._levels()
        # Two trials at a time could not tell which one made the difference. Outcomes come first: with a slow
        # draft, no draft token may pay without them.
        if cap != 0 and not caps.on_trial and may_prepare:
            best = outcomes.best
            if outcomes.add(num_outcomes, num_streams, num_drafted, elapsed_ns):
                self._decide_outcomes(outcomes, num_streams)
            if outcomes.best != best:
                caps.forget()
        if cap is None or (outcomes.on_trial and may_prepare):
            return
        if caps.add(cap, num_streams, num_drafted, elapsed_ns):
            self._decide_cap(caps, num_streams)

    def _levels(self) -> tuple[int, Level, Level]:
        """Streams that run now, and the levels of caps and outcomes for so many."""
        num_streams = self._num_streams()
        if self._entered is None or self._entered[0] != num_streams:
            self._entered = num_streams, self._caps.enter(num_streams), self._outcomes.enter(num_streams)
        return self._entered

    @property
    def num_outcomes(self) -> int:
        """Outcomes to prepare for at present."""
        if not self._may_prepare():
            return 0
        if self.is_warming_up:
            return self._outcome_options[0]
        return self._outcomes.look(self._num_streams()).option

    @property
    def is_on_trial(self) -> bool:
        """Whether another cap or number of outcomes is tried at present, or the first one is still new."""
        num_streams = self._num_streams()
        tries_outcomes = not self._knows_outcomes or self._outcomes.look(num_streams).on_trial
        return self._caps.look(num_streams).on_trial or (tries_outcomes and self._may_prepare())

    @property
    def chosen(self) -> Chosen:
        """The latest choices."""
        num_trials = self._caps.num_trials + self._outcomes.num_trials
        cap = self._caps.look(self._num_streams()).option
        return Chosen(self.costs.mean_drafted, cap, self.num_outcomes, num_trials)

    @property
    def why_plain(self) -> str:
        """Why an average stream decodes plainly; empty if it does not."""
        return self.why_not if not self.is_warming_up and self._is_plain else ""

    @property
    def _is_plain(self) -> bool:
        cap, prospects = self._caps.look(self._num_streams()).best, self.refresh()
        times = prospects.unwaited_times if self.num_outcomes else prospects.round_times
        return best_length(prospects.tokens[: cap + 1], times) == 0

    def _reason(self) -> str:
        """What a proposal costs and brings; and what trials found, where they ended it."""
        share = self.costs.proposal_share
        parts = [f"a proposal takes {share:.1f} of a pass"] if share >= _LEAST_SHARE else []
        tokens = self._prospects.tokens
        length = min(max(1, self.costs.usual_length), len(tokens) - 1)  # a request may fix a longer one
        parts.append(f"{tokens[length] - 1:.1f} of its tokens are accepted")
        caps = self._caps.look(self._num_streams())
        plain, *others = (arm.rate.tokens_per_ns(tokens) for arm in caps.arms.values())
        if plain and not caps.best:
            parts.append(f"trials were {max(others) / plain:.2f} times as fast as plain decoding")
        return f"does not pay here: {', '.join(parts)}"

    @property
    def draft_is_far(self) -> bool:
        """Whether waiting for proposals costs more than what preparing for many of them takes."""
        if self.is_warming_up or not self._may_prepare() or not self._outcomes.look(self._num_streams()).best:
            return False
        return self.costs.is_draft_slower(_SLOW_SHARE)

    def exported(self) -> dict[str, Any]:
        """All that is learnt and chosen, for another process to adopt."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def adopt(self, learnt: Mapping[str, Any]) -> None:
        """Know and choose as the process that exported this; streams keep their hold on `acceptance`."""
        vars(self.acceptance).update(vars(learnt["acceptance"]))
        vars(self).update({**learnt, "acceptance": self.acceptance})

    def _first_outcomes(self) -> int:
        """To prepare takes work, which a draft that answers quickly need not do."""
        if self._chains is not None:
            return self._chains.num_outcomes
        return self._outcome_options[-1 if self.costs.is_draft_slower(_SLOW_SHARE) else 0]

    def _end_warmup(self) -> None:
        """If acceptance and costs are known well enough to choose by."""
        num_enough = _WARMUP_PROPOSALS
        if self.costs.is_draft_slower(1.0):
            num_enough = min(num_enough, _WARMUP_PROPOSALS_SLOW_DRAFT * self._num_streams())
        if self._num_proposals >= num_enough:
            best = best_length(self.acceptance.tokens(), self._round_times())
            self._caps.first = next(cap for cap in CAPS if cap >= max(best, MIN_FIRST_CAP))
            self.is_warming_up = False

    def _decide_cap(self, caps: Level, num_streams: int) -> None:
        if caps.on_trial:
            caps.end_trial(num_streams, self.refresh().tokens, adopt=ADOPT_RATIO, keep=KEEP_RATIO)
            self.why_not = self._reason()
        else:
            self.refresh()
            caps.begin_trial(num_streams, self._expected)

    def _decide_outcomes(self, outcomes: Level, num_streams: int) -> None:
        self._knows_outcomes = True
        if outcomes.on_trial:
            keep = KEEP_RATIO_SLOW_DRAFT if self.costs.is_draft_slower(1.0) else KEEP_RATIO
            outcomes.end_trial(num_streams, self.refresh().tokens, adopt=1.0, keep=keep)
        else:
            outcomes.begin_trial(num_streams, self._expected_by_outcomes(outcomes))

    def _expected_by_outcomes(self, level: Level) -> dict[int, float]:
        """Rates by number of outcomes, if one was never tried.

        Nothing is prepared in the warm-up. If the rounds since then are slower all the same, the draft shares
        a processor with the target, which no model of costs knows.
        """
        if not level.has_untried:
            return {}
        usual, hit_rate = self.costs.usual_length, self.costs.request_hits.rate
        expected = {n: 1 / self.costs.round_ns(usual, hit_rate if n else None) for n in level.arms}
        tokens = self.refresh().tokens
        is_slower = level.arms[level.best].rate.tokens_per_ns(tokens) < self._warmup.tokens_per_ns(tokens)
        return expected | {0: math.inf} if level.best and is_slower else expected

    def _round_times(self) -> list[float]:
        """[MAX_CHOSEN + 1]: modelled, and scaled to the measured times."""
        costs, prepares = self.costs, self.num_outcomes > 0
        hit_rate = costs.request_hits.rate if prepares else None
        times = [costs.round_ns(n, hit_rate) for n in range(MAX_CHOSEN + 1)]
        if self.is_warming_up:
            return times
        caps = self._caps.look(self._num_streams())
        times[0] = caps.arms[0].rate.round_ns or times[0]
        measured = caps.arms[caps.option].rate.speculative_ns(times[0])
        if caps.option and measured and costs.usual_length:
            hit_rate = costs.proposal_hits.rate if prepares else None
            scale = measured / costs.round_ns(costs.usual_length, hit_rate)
            times[1:] = [scale * time for time in times[1:]]
        return times
