"""What all streams of a coordinator learn together: what rounds cost, and what they bring.

    time(γ)   = wait(γ) + (queue + pass(γ)) + network               as measured
    wait(γ)   = draft(γ)                                            where the proposal is asked for
                late · max(0, draft(γ + 1) - pass(γ))               where it was begun during a pass

A draft that is several rounds ahead is less late than that: `late` is the part that is seen.
The pass is priced as if all streams of the batch drafted as many tokens: what one stream's tokens cost the
others counts as its own cost. So the number falls as the batch fills, to zero where tokens cost as much as
they bring. How much all streams together may draft, and whether outcomes are prepared, is not left to this
model: it says where to begin, and `trials.py` finds out. Pure: no clock, no network, and nothing here sees a
token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.generation import Cost, Round
from coordinator.length.trials import CAPS, FIRST_CAP, STAYS, Trials
from specwire.core import Load
from specwire.estimate.costs import CostModel
from specwire.estimate.forecast import SharedAcceptance

MAX_CHOSEN = CAPS[-1]
"""Most draft tokens a round that are ever chosen."""

MAX_OUTCOMES = 32
"""Outcomes that are prepared for where that pays."""

_RATE = 0.2
_RENEW_EVERY = 8
_FIRST_PROPOSALS, _FIRST_FAR_PROPOSALS = 12, 4
"""After so many acceptance and costs are known well enough to judge by them; after few of each stream where
one takes longer than a pass: more is learnt from those that nobody waits for."""
_YOUNG_LENGTHS = (2, 8)
"""Of the first proposals, in turns."""
_OUTLIER = 4
_HIT_RATE = 0.02
_USUAL_WAITS = 2
_STAYS_FAR = 0.9
"""Farther than a pass, outcomes are prepared until that is clearly worse: in lockstep every round waits."""
_FAR = 0.25
"""A draft is far away when its answer takes this part of a pass.

Measured with the embedded pair: rejection sampling commits 1.08 times the tokens of Gumbel coupling, but 0.46
of its proposals were prepared, and 0.86 under Gumbel coupling. With a wait of w passes for all others,
(1 + 0.54 w) / (1 + 0.14 w) is over 1.08 from w = 0.2 on.
"""


class Prospects(NamedTuple):
    """What a number of draft tokens promises to a stream like any other.

    Attributes:
        tokens: [MAX_CHOSEN + 1] that a round with 0, 1, ... draft tokens commits on the average.
        round_times: [MAX_CHOSEN + 1] nanoseconds of a round with 0, 1, ... draft tokens.
        unwaited_times: [MAX_CHOSEN + 1] likewise, of one that does not wait for them.
    """

    tokens: list[float]
    round_times: list[float]
    unwaited_times: list[float]


class Chosen(NamedTuple):
    """What rounds are like now, for whoever only looks.

    Attributes:
        num_draft_tokens: of the latest rounds that drafted any, on the average.
        cap: most draft tokens in rounds whose number is chosen.
        num_outcomes: prepared for.
        num_trials: of caps and of outcomes, begun so far.
    """

    num_draft_tokens: float
    cap: int
    num_outcomes: int
    num_trials: int


@dataclass
class HitRate:
    """How often a proposal was there, or under way, when it was asked for; old rounds faded."""

    rate: float = 0.0
    num_seen: int = 0

    def add(self, is_hit: bool) -> None:
        """One round."""
        self.num_seen += 1
        self.rate += max(_HIT_RATE, 1 / self.num_seen) * (is_hit - self.rate)


class SharedMeasurements:
    """What all streams of a coordinator learn together. Times in nanoseconds.

    Args:
        num_streams: how many of them run now.
        num_outcomes: to prepare for; None finds out what pays.
    """

    def __init__(self, num_streams: Callable[[], int], *, num_outcomes: int | None = 0) -> None:
        self.acceptance = SharedAcceptance()
        self._num_streams = num_streams
        self._fixed_outcomes = num_outcomes
        self._first_cap = FIRST_CAP
        self._caps = Trials(CAPS, lambda: self._first_cap, self._tokens, expected=self._expected_rate)
        self._outcomes = Trials(
            (0, MAX_OUTCOMES),
            self._first_outcomes,
            self._tokens,
            expected=self._expected_with,
            advantage=1.0,
            stays=lambda: _STAYS_FAR if self._is_far else STAYS,
        )
        self._hit_rate = HitRate()  # of rounds that had a proposal
        self._hit_chance = HitRate()  # of rounds that wanted one
        self._hit_wait_ns = self._hit_expected_ns = 0.0
        self._draft_costs = CostModel(
            2
        )  # of a proposal: its tokens, and those that it had not proposed itself
        self._load = Load()
        self._num_sequences = 1.0
        self._network_ns = 0.0
        self._queue_ns = 0.0
        self._num_drafted = 0.0
        self._num_added = self._renew_at = self._num_proposals = 0
        self._is_new = True
        self._prospects: Prospects

    def prospects(self) -> Prospects:
        """What to choose by; made anew after a few rounds, since all streams ask in every round."""
        if self._num_added >= self._renew_at:
            self._renew_at = self._num_added + min(_RENEW_EVERY, 1 + self._num_added // 2)
            round_times = self._round_times()
            unwaited = [self._unwaited_ns(n) for n in range(MAX_CHOSEN + 1)]
            scale = round_times[0] / unwaited[0]
            self._prospects = Prospects(
                self.acceptance.tokens(), round_times, [scale * time for time in unwaited]
            )
        return self._prospects

    @property
    def cap(self) -> int:
        """Most draft tokens in the rounds that begin now."""
        return _YOUNG_LENGTHS[-1] if self._is_new else self._caps.option(self._num_streams())

    @property
    def young_length(self) -> int | None:
        """As long as nothing is known: the costs of one length tell nothing of another."""
        return _YOUNG_LENGTHS[self._num_proposals % len(_YOUNG_LENGTHS)] if self._is_new else None

    @property
    def num_outcomes(self) -> int:
        """Outcomes to prepare for in the rounds that begin now."""
        if self._fixed_outcomes is not None:
            return self._fixed_outcomes
        return 0 if self._is_new else self._outcomes.option(self._num_streams())

    def _first_outcomes(self) -> int:
        """Before any trial: to prepare takes work, which a draft that answers at once need not do."""
        return MAX_OUTCOMES if self._waits_long else 0

    @property
    def chosen(self) -> Chosen:
        """What was chosen last; to read it changes nothing."""
        num_streams, fixed = self._num_streams(), self._fixed_outcomes
        return Chosen(
            self._num_drafted,
            self._caps.seen(num_streams),
            self._outcomes.seen(num_streams) if fixed is None else fixed,
            self._caps.num_trials + self._outcomes.num_trials,
        )

    @property
    def draft_is_far(self) -> bool:
        """Whether waiting for proposals costs more than what preparing for many of them takes."""
        if self._is_new:
            return False
        fixed = self._fixed_outcomes
        prepares = self._outcomes.best(self._num_streams()) if fixed is None else fixed
        return bool(prepares) and self._waits_long

    @property
    def _waits_long(self) -> bool:
        """Whether a proposal that was not prepared takes a good part of a pass."""
        return self._proposal_ns > _FAR * self._pass_ns(round(self._num_drafted))

    @property
    def _proposal_ns(self) -> float:
        """The usual wait for a proposal that was not prepared."""
        return self._draft_costs.predict((round(self._num_drafted), 1))

    @property
    def on_trial(self) -> bool:
        """True while the cap is an experiment: then something is to be drafted, whatever a stream expects."""
        return not self._is_new and self._caps.on_trial(self._num_streams())

    @property
    def _is_known(self) -> bool:
        wanted = min(_FIRST_PROPOSALS, _FIRST_FAR_PROPOSALS * self._num_streams())
        return self._num_proposals >= (wanted if self._is_far else _FIRST_PROPOSALS)

    @property
    def _is_far(self) -> bool:
        """Whether a proposal that was not prepared takes longer than a pass."""
        return self._proposal_ns > self._pass_ns(round(self._num_drafted))

    def patience_s(self, num_draft_tokens: int, prospects: Prospects) -> float:
        """Longest worthwhile wait for a proposal, in seconds.

        What the proposal saves is what plain rounds would take for its accepted tokens. Whoever has waited as
        long as that beyond what is usual, and then goes on without, has lost at most twice what was at stake.
        """
        expected = prospects.tokens[num_draft_tokens] - 1
        usual_ns = _USUAL_WAITS * self._draft_costs.predict((num_draft_tokens, 1))
        return (usual_ns + expected * prospects.round_times[0]) / 1e9 if usual_ns else math.inf

    def add(self, done: Round) -> None:
        """Learn from a round of any stream."""
        self._num_added += 1
        num_drafted, draft_cost = len(done.proposal.token_ids), done.draft_cost
        if num_drafted:
            self._num_proposals += 1
            self._num_drafted += _RATE * (num_drafted - self._num_drafted)
            if draft_cost.forward_ns:
                self._draft_costs.add(
                    (num_drafted, draft_cost.num_prefill_tokens), max(1, draft_cost.wall_ns)
                )
            else:
                self._hit_wait_ns += _RATE * (draft_cost.wall_ns - self._hit_wait_ns)
                expected_ns = self._late_ns(num_drafted, self._pass_ns(num_drafted))
                self._hit_expected_ns += _RATE * (expected_ns - self._hit_expected_ns)
        self._add_hit(num_drafted > 0, not draft_cost.forward_ns, draft_cost.timed_out)
        self._add_verify(done.verify_cost, num_drafted)
        if self._is_new and self._is_known:
            self._first_cap = self._modelled_cap()
            self._is_new = False

    def add_settled(self, cap: int | None, num_outcomes: int, num_drafted: int, elapsed_ns: int) -> None:
        """A round of a settled stream, and its time: under the cap of all, or under None of its own."""
        if self._is_new:
            return
        num_streams = self._num_streams()
        # Two trials at a time would not know whose merit it was. Outcomes come first: far away, no draft
        # token may pay without them.
        if cap != 0 and not self._caps.on_trial(num_streams) and self._fixed_outcomes is None:
            best = self._outcomes.best(num_streams)
            self._outcomes.add(num_outcomes, num_streams, num_drafted, elapsed_ns)
            if self._outcomes.best(num_streams) != best:
                self._caps.forget(num_streams)
        if cap is not None and not self._outcomes.on_trial(num_streams):
            self._caps.add(cap, num_streams, num_drafted, elapsed_ns)

    def _add_hit(self, is_there: bool, was_begun: bool, timed_out: bool) -> None:
        """A proposal had been begun before it was asked for, or not, where that was wanted."""
        if is_there and (was_begun or self.num_outcomes):
            self._hit_rate.add(was_begun)
            self._hit_chance.add(was_begun)
        elif timed_out and self.num_outcomes:
            self._hit_chance.add(False)

    def _tokens(self) -> list[float]:
        return self.prospects().tokens

    def _expected_rate(self, cap: int) -> float:
        """Tokens a nanosecond with at least a draft token and at most `cap`, by what is modelled."""
        tokens, round_times, _ = self.prospects()
        return max(tokens[n] / round_times[n] for n in range(min(1, cap), cap + 1))

    def _expected_with(self, num_outcomes: int) -> float:
        """Rounds a nanosecond, likewise."""
        usual = round(self._num_drafted)
        return 1 / self._round_ns(usual, self._hit_chance if num_outcomes else None)

    def _modelled_cap(self) -> int:
        """To begin the trials with. Not less than usual: what the network costs is hidden by preparing."""
        best = best_length(self.acceptance.tokens(), self._round_times())
        return next(cap for cap in CAPS if cap >= max(best, FIRST_CAP))

    def _add_verify(self, cost: Cost, num_drafted: int) -> None:
        if cost.load is None or not cost.load.base_ns:
            return
        self._load = cost.load
        self._num_sequences += _RATE * (cost.load.num_sequences - self._num_sequences)
        if cost.queue_ns + cost.forward_ns > _OUTLIER * (self._pass_ns(num_drafted) + self._queue_ns):
            return  # a prompt, or memory that was lost: no measure for a round
        self._queue_ns += _RATE * (cost.queue_ns - self._queue_ns)
        self._network_ns += _RATE * (cost.wall_ns - cost.queue_ns - cost.forward_ns - self._network_ns)

    def _round_times(self) -> list[float]:
        """[MAX_CHOSEN + 1]: modelled, and scaled to what was measured."""
        prepares = self.num_outcomes > 0
        times = [self._round_ns(n, self._hit_chance if prepares else None) for n in range(MAX_CHOSEN + 1)]
        if self._is_new:
            return times
        num_streams = self._num_streams()
        times[0] = self._caps.rate(0, num_streams).round_ns or times[0]
        speculative = self._caps.rate(self.cap, num_streams).speculative_ns(times[0])
        usual = round(self._num_drafted)
        if self.cap and speculative and usual:
            scale = speculative / self._round_ns(usual, self._hit_rate if prepares else None)
            times[1:] = [scale * time for time in times[1:]]
        return times

    def _round_ns(self, num_draft_tokens: int, hits: HitRate | None) -> float:
        """So many proposals were prepared; None where none is."""
        wait_ns = self._wait_ns(num_draft_tokens, hits) if num_draft_tokens else 0.0
        return wait_ns + self._unwaited_ns(num_draft_tokens)

    def _unwaited_ns(self, num_draft_tokens: int) -> float:
        """Queues grow and shrink with the passes."""
        pass_ns = self._pass_ns(num_draft_tokens)
        queue_ns = self._queue_ns * pass_ns / max(1.0, self._pass_ns(round(self._num_drafted)))
        return max(1.0, queue_ns + pass_ns + self._network_ns)

    def _wait_ns(self, num_draft_tokens: int, hits: HitRate | None) -> float:
        """For a proposal, on the average of those that were prepared and those that were not."""
        asked_ns = self._draft_costs.predict((num_draft_tokens, 1))
        if hits is None:
            return asked_ns
        seen = min(1.0, self._hit_wait_ns / self._hit_expected_ns) if self._hit_expected_ns else 1.0
        prepared_ns = seen * self._late_ns(num_draft_tokens, self._pass_ns(num_draft_tokens))
        return hits.rate * prepared_ns + (1 - hits.rate) * asked_ns

    def _late_ns(self, num_draft_tokens: int, pass_ns: float) -> float:
        """How long after a pass the proposal comes that was begun with it.

        To know what may follow a whole proposal takes a step more.
        """
        return max(0.0, self._draft_costs.predict((num_draft_tokens + 1, 1)) - pass_ns)

    def _pass_ns(self, num_draft_tokens: int) -> float:
        """A pass of the usual batch in which every stream has so many draft tokens."""
        load = self._load
        per_sequence = load.sequence_ns + load.token_ns * (num_draft_tokens + 1)
        return load.base_ns + self._num_sequences * per_sequence


def best_length(tokens: Sequence[float], round_times: Sequence[float]) -> int:
    """The number of draft tokens that promises the most tokens a second.

    Args:
        tokens: [limit + 1] by number of draft tokens.
        round_times: [limit + 1 or more] likewise, in any unit.

    Returns:
        0 unless something promises more than plain decoding.
    """
    return max(range(len(tokens)), key=lambda n: tokens[n] / round_times[n])
