"""The time of a round by number of draft tokens, modelled from measured costs. Pure: no clock, no I/O.

    time(γ)   = wait(γ) + (queue + pass(γ)) + network
    wait(γ)   = draft(γ)                                    the proposal is requested when it is needed
                lateness · max(0, draft(γ + 1) - pass(γ))   the draft began it during the pass before

A draft that works several rounds ahead is less late than that: `lateness` is the measured ratio. A pass is
priced as if all streams of the batch drafted as many tokens: a stream is charged what its tokens cost others.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.cost import Cost
from coordinator.generation import Round
from specwire.core import Load
from specwire.estimate.costs import CostModel

_RATE = 0.2
"""Learning rate of the moving averages."""
_MIN_HIT_RATE = 0.02
"""Learning rate of hit rates, once there are enough rounds to average over."""
_OUTLIER_RATIO = 4
"""A verify request that takes so many times its modelled time (a prompt, lost memory) is not averaged."""


@dataclass
class HitRate:
    """Share of rounds whose proposal was there, or begun, when it was needed; recent rounds count more."""

    rate: float = 0.0
    num_rounds: int = 0

    def add(self, is_hit: bool) -> None:
        """One round."""
        self.num_rounds += 1
        self.rate += max(_MIN_HIT_RATE, 1 / self.num_rounds) * (is_hit - self.rate)


class RoundCosts:
    """Costs of the rounds of all streams. Times in nanoseconds.

    Attributes:
        mean_drafted: draft tokens of rounds that had any.
        proposal_hits: hit rate of rounds that had a proposal.
        request_hits: hit rate of rounds that requested one, with or without success.
    """

    def __init__(self, num_nodes: int = 0, num_chains: int = 1) -> None:
        """Args:
        num_nodes: of trees, whose depth is meant by draft tokens here; 0 for chains.
        num_chains: of a round, whose length is meant then.
        """
        self._num_nodes = num_nodes
        self._num_chains = num_chains
        self.mean_drafted = 0.0
        self.proposal_hits, self.request_hits = HitRate(), HitRate()
        self._draft = CostModel(2)  # by number of draft tokens and of prefill tokens
        self._load = Load()
        self._mean_sequences = 1.0
        self._queue_ns = self._network_ns = 0.0
        self._late_measured_ns = self._late_modelled_ns = 0.0

    def add(self, done: Round, *, prepares: bool) -> None:
        """A round of any stream; `prepares` where outcomes are prepared at present."""
        num_drafted, cost = done.num_steps, done.draft_cost
        is_hit = cost.is_hit
        if num_drafted:
            self.mean_drafted += _RATE * (num_drafted - self.mean_drafted)
            if is_hit:
                self._late_measured_ns += _RATE * (cost.wall_ns - self._late_measured_ns)
                self._late_modelled_ns += _RATE * (self._late_ns(num_drafted) - self._late_modelled_ns)
            else:
                self._draft.add((num_drafted, cost.num_prefill_tokens), max(1, cost.wall_ns))
        if num_drafted and (is_hit or prepares):
            self.proposal_hits.add(is_hit)
            self.request_hits.add(is_hit)
        elif cost.timed_out and prepares:
            self.request_hits.add(False)
        self._add_verify(done.verify_cost, num_drafted)

    def _add_verify(self, cost: Cost, num_drafted: int) -> None:
        if cost.load is None or not cost.load.base_ns:
            return
        self._load = cost.load
        self._mean_sequences += _RATE * (cost.load.num_sequences - self._mean_sequences)
        if cost.queue_ns + cost.forward_ns > _OUTLIER_RATIO * (self._pass_ns(num_drafted) + self._queue_ns):
            return
        self._queue_ns += _RATE * (cost.queue_ns - self._queue_ns)
        self._network_ns += _RATE * (cost.network_ns + cost.handling_ns - self._network_ns)

    @property
    def usual_length(self) -> int:
        """The mean number of draft tokens, rounded."""
        return round(self.mean_drafted)

    def is_draft_slower(self, share: float) -> bool:
        """Whether a proposal that was not prepared takes longer than this share of a pass."""
        return self.proposal_ns(self.usual_length) > share * self._pass_ns(self.usual_length)

    def round_ns(self, num_draft_tokens: int, hit_rate: float | None) -> float:
        """A round that waits for its proposal; `hit_rate` is None where no outcomes are prepared."""
        wait_ns = self._wait_ns(num_draft_tokens, hit_rate) if num_draft_tokens else 0.0
        return wait_ns + self.unwaited_ns(num_draft_tokens)

    def unwaited_ns(self, num_draft_tokens: int) -> float:
        """A round without the wait for its proposal. Queues grow and shrink with the passes."""
        pass_ns = self._pass_ns(num_draft_tokens)
        queue_ns = self._queue_ns * pass_ns / max(1.0, self._pass_ns(self.usual_length))
        return max(1.0, queue_ns + pass_ns + self._network_ns)

    def unwaited_times(self, most: int) -> list[float]:
        """[most + 1] of `unwaited_ns`."""
        return [self.unwaited_ns(n) for n in range(most + 1)]

    def proposal_ns(self, num_draft_tokens: int) -> float:
        """From the request for a proposal that was not prepared to its arrival."""
        return self._draft.predict((num_draft_tokens, 1))

    @property
    def proposal_share(self) -> float:
        """What the usual proposal takes, if it was not prepared, in passes of plain decoding."""
        return self.proposal_ns(max(1, self.usual_length)) / max(1.0, self._pass_ns(0))

    def _wait_ns(self, num_draft_tokens: int, hit_rate: float | None) -> float:
        """For a proposal: the mean of those that were prepared and those that were not."""
        requested_ns = self.proposal_ns(num_draft_tokens)
        if hit_rate is None:
            return requested_ns
        modelled_ns = self._late_modelled_ns
        lateness = min(1.0, self._late_measured_ns / modelled_ns) if modelled_ns else 1.0
        prepared_ns = lateness * self._late_ns(num_draft_tokens)
        return hit_rate * prepared_ns + (1 - hit_rate) * requested_ns

    def _late_ns(self, num_draft_tokens: int) -> float:
        """From the end of a pass to the arrival of a proposal begun at its start.

        It takes one step more: the token after the whole previous proposal has to be guessed as well.
        """
        return max(0.0, self.proposal_ns(num_draft_tokens + 1) - self._pass_ns(num_draft_tokens))

    def _pass_ns(self, num_draft_tokens: int) -> float:
        """A pass of the usual batch in which every stream has so many draft tokens, or trees so deep."""
        load = self._load
        is_tree = self._num_nodes and num_draft_tokens
        num_tokens = self._num_nodes if is_tree else num_draft_tokens * self._num_chains
        per_sequence = load.sequence_ns + load.token_ns * (num_tokens + 1)
        return load.base_ns + self._mean_sequences * per_sequence
