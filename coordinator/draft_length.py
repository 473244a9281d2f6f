"""How many tokens to draft: the number that promises the most tokens a second, chosen anew in each round.

    tokens(γ) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_γ               a_i: acceptance at position i, as measured
    time(γ)   = draft(γ) + (queue + pass(γ)) + network              as measured, or zero draft(0)

The pass is priced as if all streams of the batch drafted as many tokens: what one stream's tokens cost the
others counts as its own cost. So the number falls as the batch fills, to zero where tokens cost as much as
they bring. How much all streams together may draft is not left to the model: `trials.py` finds out. Pure: no
clock, no network, and nothing here sees a token.

Source of the closed form: Leviathan et al. 2023 (arXiv 2211.17192), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coordinator.generation import Cost, Round
from coordinator.trials import CAPS, Settling, Trials
from specwire.core import Load
from specwire.costs import CostModel

MAX_CHOSEN = CAPS[-1]
"""Most draft tokens a round that are ever chosen."""

_PRIOR_ACCEPTANCE = 0.75
_SHARED_MEMORY, _SHARED_PRIOR_WEIGHT = 0.999, 4.0
_OWN_MEMORY, _OWN_PRIOR_WEIGHT = 0.9, 10.0
_RATE = 0.2
_RENEW_EVERY = 8
_OUTLIER = 4


class FixedLength:
    """Always the same."""

    def __init__(self, num_draft_tokens: int) -> None:
        self.limit = num_draft_tokens

    def choose(self) -> int:
        """See `generation.DraftLength`."""
        return self.limit

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.DraftLength`."""


class Acceptance:
    """How often draft tokens are accepted, by position, given that those before them were.

    Old rounds are forgotten by and by: `memory` is what is left of a judgement after the next one, and
    `prior_weight` is how many judgements a prior counts for.
    """

    def __init__(self, memory: float, prior_weight: float) -> None:
        self._memory = memory
        self._prior_weight = prior_weight
        self._judged = [0.0] * MAX_CHOSEN
        self._accepted = [0.0] * MAX_CHOSEN
        self._all_judged = 0.0
        self._all_accepted = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One round: what came after a rejected token was never judged."""
        for i in range(min(num_drafted, num_accepted + 1, MAX_CHOSEN)):
            accepted = i < num_accepted
            self._judged[i] = self._judged[i] * self._memory + 1
            self._accepted[i] = self._accepted[i] * self._memory + accepted
            self._all_judged = self._all_judged * self._memory + 1
            self._all_accepted = self._all_accepted * self._memory + accepted

    def fade(self) -> None:
        """Forget as much as with one judgement at each position."""
        self._judged = [self._memory * n for n in self._judged]
        self._accepted = [self._memory * n for n in self._accepted]
        self._all_judged *= self._memory
        self._all_accepted *= self._memory

    def overall(self, prior: float) -> float:
        """At any position."""
        return self._mean(self._all_accepted, self._all_judged, prior)

    def by_position(self) -> list[float]:
        """[MAX_CHOSEN]; where little was judged, what holds at any position."""
        overall = self.overall(_PRIOR_ACCEPTANCE)
        return [self._mean(a, n, overall) for a, n in zip(self._accepted, self._judged, strict=True)]

    def _mean(self, accepted: float, judged: float, prior: float) -> float:
        return (accepted + self._prior_weight * prior) / (judged + self._prior_weight)


class Prospects(NamedTuple):
    """What a number of draft tokens promises to a stream like any other.

    Attributes:
        overall: acceptance at any position.
        acceptance: [MAX_CHOSEN] at each position, given that those before were accepted.
        round_times: [MAX_CHOSEN + 1] nanoseconds of a round with 0, 1, ... draft tokens.
    """

    overall: float
    acceptance: list[float]
    round_times: list[float]


class SharedMeasurements:
    """What all streams of a coordinator learn together. Times in nanoseconds.

    Args:
        num_streams: how many of them run now.
    """

    def __init__(self, num_streams: Callable[[], int]) -> None:
        self.acceptance = Acceptance(_SHARED_MEMORY, _SHARED_PRIOR_WEIGHT)
        self._num_streams = num_streams
        self._trials = Trials()
        self._draft_costs = CostModel(2)  # of a proposal: its tokens, and those that the draft had to be told
        self._load = Load()
        self._num_sequences = 1.0
        self._network_ns = 0.0
        self._queue_ns = 0.0
        self._num_drafted = 0.0
        self._num_added = self._renew_at = 0
        self._prospects: Prospects

    def prospects(self) -> Prospects:
        """What to choose by; made anew after a few rounds, since all streams ask in every round."""
        if self._num_added >= self._renew_at:
            self._renew_at = self._num_added + _RENEW_EVERY
            self._prospects = Prospects(
                self.acceptance.overall(_PRIOR_ACCEPTANCE), self.acceptance.by_position(), self._round_times()
            )
        return self._prospects

    @property
    def cap(self) -> int:
        """Most draft tokens in the rounds that begin now."""
        return self._trials.cap(self._num_streams())

    @property
    def on_trial(self) -> bool:
        """True while that is an experiment: then something is to be drafted, whatever a stream expects."""
        return self._trials.on_trial(self._num_streams())

    def add(self, done: Round) -> None:
        """Learn from a round of any stream."""
        self._num_added += 1
        num_drafted, draft_cost = len(done.proposal.token_ids), done.draft_cost
        self.acceptance.add(num_drafted, done.outcome.num_accepted)
        if num_drafted:
            self._num_drafted += _RATE * (num_drafted - self._num_drafted)
            self._draft_costs.add((num_drafted, draft_cost.num_told_tokens), max(1, draft_cost.wall_ns))
        self._add_verify(done.verify_cost, num_drafted)

    def add_settled(self, cap: int, num_tokens: int, elapsed_ns: int) -> None:
        """A round of a stream that has settled under this cap, from its beginning to its end."""
        self._trials.add(cap, self._num_streams(), num_tokens, elapsed_ns)

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
        times = [self._round_ns(n) for n in range(MAX_CHOSEN + 1)]
        num_streams = self._num_streams()
        speculative = self._trials.rate(self.cap, num_streams).round_ns
        usual = round(self._num_drafted)
        if self.cap and speculative and usual:
            scale = speculative / times[usual]
            times[1:] = [scale * time for time in times[1:]]
        times[0] = self._trials.rate(0, num_streams).round_ns or times[0]
        return times

    def _round_ns(self, num_draft_tokens: int) -> float:
        """Queues grow and shrink with the passes."""
        pass_ns = self._pass_ns(num_draft_tokens)
        queue_ns = self._queue_ns * pass_ns / max(1.0, self._pass_ns(round(self._num_drafted)))
        draft_ns = self._draft_costs.predict((num_draft_tokens, 1)) if num_draft_tokens else 0.0
        return max(1.0, draft_ns + queue_ns + pass_ns + self._network_ns)

    def _pass_ns(self, num_draft_tokens: int) -> float:
        """A pass of the usual batch in which every stream has so many draft tokens."""
        load = self._load
        per_sequence = load.sequence_ns + load.token_ns * (num_draft_tokens + 1)
        return load.base_ns + self._num_sequences * per_sequence


class AdaptiveLength:
    """Of one stream: what pays for its text, under the cap of all."""

    limit = MAX_CHOSEN

    def __init__(self, shared: SharedMeasurements) -> None:
        self._shared = shared
        self._own = Acceptance(_OWN_MEMORY, _OWN_PRIOR_WEIGHT)
        self._settling = Settling()

    def choose(self) -> int:
        """See `generation.DraftLength`."""
        cap = self._shared.cap
        self._settling.enter(cap)
        if cap == 0:
            return 0
        prospects = self._shared.prospects()
        # By position as all streams have it, scaled to how easy this one is.
        ease = self._own.overall(prospects.overall) / prospects.overall
        acceptance = [min(1.0, ease * rate) for rate in prospects.acceptance[:cap]]
        best = best_length(acceptance, prospects.round_times)
        return max(1, best) if self._shared.on_trial else best

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.DraftLength`."""
        num_drafted = len(done.proposal.token_ids)
        if num_drafted:
            self._own.add(num_drafted, done.outcome.num_accepted)
        else:
            self._own.fade()  # the text may have become easier: by and by it is like any other again
        self._shared.add(done)
        cap = self._settling.settled
        if cap is not None:
            self._shared.add_settled(cap, done.outcome.num_accepted + 1, elapsed_ns)


def best_length(acceptance: Sequence[float], round_times: Sequence[float]) -> int:
    """The number of draft tokens with the most expected tokens a second.

    Args:
        acceptance: [limit] at each position, given that those before were accepted.
        round_times: [limit + 1] of a round with 0, 1, ... draft tokens, in any unit.

    Returns:
        0 unless something promises more than plain decoding.
    """
    best, best_rate = 0, 1 / round_times[0]
    expected, all_accepted = 1.0, 1.0
    for n, rate in enumerate(acceptance, start=1):
        all_accepted *= rate
        expected += all_accepted
        if expected / round_times[n] > best_rate:
            best, best_rate = n, expected / round_times[n]
    return best
