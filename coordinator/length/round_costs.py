"""The time of a round by number of draft tokens, modelled from measured costs. Pure: no clock, no I/O.

    time(γ)   = wait(γ) + (queue + pass(γ)) + network
    wait(γ)   = draft(γ)                                    the proposal is requested when it is needed, or
                                                            the target drafts it by itself
                lateness · max(0, draft(γ + 1) - pass(γ))   the draft began it during the pass before

A draft that works several rounds ahead is less late than that: `lateness` is the measured ratio. A pass is
priced as if all streams of the batch drafted as many tokens: a stream is charged what its tokens cost others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.cost import CallOutcome, Cost
from coordinator.generation import Round
from coordinator.length.ways import CHAIN, MAX_CHOSEN, Way
from specwire.core import Load
from specwire.proposals.estimate.costs import CostModel
from specwire.proposals.estimate.rates import Mean

_RATE = 0.2
"""Learning rate of the moving averages."""
_MANY_ROUNDS = 50
"""That rates of rare events are averaged over: hits, what is asked for (the first round of each stream is,
whoever begins the others), and what prompts take of a draft, where as many rounds without any are assumed at
first. About five requests."""
_FIRST_HIT_RATE, _FIRST_HIT_ROUNDS = 0.8, 4
"""Hit rate before any is measured, and its weight in rounds: 0.86 was measured for the embedded pair under
Gumbel coupling. From 0, a draft 20 ms away never came to be waited for."""
_TREE_WIDTH = 8
"""Nodes that a pass of a draft runs of a tree, at most."""
_FIRST_PROPOSALS = 3
"""After so many, costs are known: the first has a prompt in it."""


@dataclass
class RoundBlock:
    """Rounds of a way that are measured together.

    Attributes:
        num_sequences: of a verify pass, on the average.
        num_rounds: of all streams.
        steps: how many rounds had so many draft tokens one after another.
        num_tokens: that they committed.
        is_plain: no round had draft tokens, as was planned: none were waited for. One that has makes the
            passes of all longer.
    """

    way: Way
    num_sequences: float = 1.0
    num_rounds: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    time_ns: float = 0.0
    num_tokens: int = 0
    is_plain: bool = True

    def add(self, num_steps: int, num_tokens: int, elapsed_ns: int, *, is_plain: bool) -> None:
        """A round of any stream."""
        self.is_plain &= is_plain
        self.num_rounds += 1
        self.steps[num_steps] = self.steps.get(num_steps, 0) + 1
        self.num_tokens += num_tokens
        self.time_ns += elapsed_ns


class _Proposals:
    """What proposals of a shape cost, and how late those are that were prepared.

    Attributes:
        hits: share of rounds whose proposal was there, or begun, when it was needed.
    """

    def __init__(self) -> None:
        self.draft = CostModel(2)  # by number of draft tokens and of prefill tokens
        self.hits = Mean(_FIRST_HIT_RATE, num_rounds=_FIRST_HIT_ROUNDS, least_rate=1 / _MANY_ROUNDS)
        self.late_measured_ns = self.late_modelled_ns = 0.0
        self._sizes: set[int] = set()

    @property
    def are_known(self) -> bool:
        """Whether any was measured."""
        return bool(self.draft.base or any(self.draft.rates))

    def add(self, num_steps: int, cost: Cost) -> None:
        """One that was not prepared. Longer ones than any so far take so much more as they compute more."""
        wall_ns, prefill = max(1, cost.wall_ns), cost.num_prefill_tokens
        self.draft.add((num_steps, prefill), wall_ns)
        self._sizes.add((1 + num_steps).bit_length())
        if (2 + 2 * num_steps).bit_length() > max(self._sizes):
            self.draft.add(
                (2 * num_steps + 1, prefill), wall_ns + cost.forward_ns * (num_steps + 1) / num_steps
            )


class RoundCosts:
    """Costs of the rounds of all streams. Times in nanoseconds.

    Attributes:
        mean_drafted: draft tokens one after another of rounds that had any.
        num_sequences: of a verify pass, on the average.
    """

    def __init__(self, num_chains: int = 1) -> None:
        """Args:
        num_chains: of a round, whose length is meant by draft tokens then.
        """
        self._num_chains = num_chains
        self._proposals = {CHAIN: _Proposals()}
        self._num_proposals = 0
        self._load, self._told, self._target_told = Load(), Load(), Load()
        self._once_ns = Mean(0.0, num_rounds=_MANY_ROUNDS, least_rate=1 / _MANY_ROUNDS)
        self._length = Mean(0.0, num_rounds=0, least_rate=1 / _MANY_ROUNDS)  # of what is committed
        self._round_tokens = Mean(1.0, num_rounds=1, least_rate=1 / _MANY_ROUNDS)
        self._queue_share = self._network_ns = self.mean_drafted = 0.0
        self._asked_share = {True: 0.0, False: 1.0}  # see `_goes_on`
        self.num_sequences = 1.0

    def know(self, target: Load | None, draft: Load | None) -> None:
        """What passes cost, before any round."""
        if target is not None and not self._target_told.base_ns:
            self._target_told = target
            self._load = self._load if self._load.base_ns else target
        self._told = draft or self._told

    def rescale(self, num_streams: int, before: int) -> None:
        """Other streams run: passes will have as many more sequences, before they are seen."""
        self.num_sequences = min(float(num_streams), self.num_sequences * num_streams / before)
        self.num_sequences = max(1.0, self.num_sequences)

    def add(self, done: Round, way: Way) -> None:
        """A round of any stream."""
        num_steps, cost = done.num_steps, done.draft_cost
        self._add_verify(done.verify_cost, way, num_steps)
        self._length.add(done.proposal.base_len)
        if way.drafts:
            self._once_ns.add(self._prompt_ns(done))
            self._round_tokens.add(len(done.token_ids))
        if num_steps:
            self._num_proposals += 1
            self.mean_drafted += _RATE * (num_steps - self.mean_drafted)
            if way.num_nodes not in self._proposals:
                self._proposals[way.num_nodes] = _Proposals()
            proposals = self._proposals[way.num_nodes]
            if cost.is_hit:
                proposals.late_measured_ns += _RATE * (cost.wall_ns - proposals.late_measured_ns)
                modelled_ns = self._late_ns(way, num_steps)
                proposals.late_modelled_ns += _RATE * (modelled_ns - proposals.late_modelled_ns)
            else:
                proposals.add(num_steps, cost)
        if way.prepares and way.num_nodes in self._proposals and (num_steps or cost.timed_out):
            self._proposals[way.num_nodes].hits.add(cost.is_hit)

    def _add_verify(self, cost: Cost, way: Way, num_steps: int) -> None:
        if cost.load is None or not cost.load.base_ns:
            return
        self._load = cost.load
        self.num_sequences += _RATE * (cost.load.num_sequences - self.num_sequences)
        pass_ns = max(1.0, self._pass_ns(way, num_steps, self.num_sequences))
        self._queue_share += _RATE * (cost.queue_ns / pass_ns - self._queue_share)
        is_asked, goes_on = cost.outcome is CallOutcome.ASKED, self._goes_on(num_steps)
        self._asked_share[goes_on] += (is_asked - self._asked_share[goes_on]) / _MANY_ROUNDS
        if is_asked:
            self._network_ns += _RATE * (cost.network_ns + cost.handling_ns - self._network_ns)

    def _prompt_ns(self, done: Round) -> float:
        """What beginnings of sequences took of a draft in a round."""
        load, cost = done.verify_cost.load, done.draft_cost
        if self.is_drafted_by_target:
            return load.draft_prefill_ns if load else 0.0
        _, prefill_ns = self._proposals[CHAIN].draft.rates
        return prefill_ns * max(0, cost.num_prefill_tokens - MAX_CHOSEN)

    @property
    def pass_ns(self) -> float:
        """Of one token."""
        return max(1.0, self._load.pass_ns(1, 1))

    def alone_ns(self, num_streams: int) -> float:
        """A pass of plain decoding, as measured before any draft ran beside it; 0 if it was not."""
        return self._target_told.pass_ns(num_streams, num_streams)

    @property
    def once_ns(self) -> float:
        """What prompts take of the draft, by token that is written."""
        return self._once_ns.value / self._round_tokens.value

    @property
    def catch_up_ns(self) -> float:
        """What the draft takes for the texts of all streams, before it drafts for them."""
        num_tokens = self.num_sequences * self._length.value
        if self.is_drafted_by_target:
            return self._load.own_draft_ns(0, num_tokens)
        return self._told.pass_ns(self.num_sequences, num_tokens)

    @property
    def are_known(self) -> bool:
        """Whether what passes and proposals cost is known, so that ways can be compared."""
        is_told = self.is_drafted_by_target or self._told.base_ns > 0
        return self._load.base_ns > 0 and (is_told or self._num_proposals >= _FIRST_PROPOSALS)

    @property
    def is_drafted_by_target(self) -> bool:
        """Whether the target drafts by itself, for all sequences of a pass together."""
        return self._load.draft_pass_ns > 0 or self._load.draft_node_ns > 0

    def proposal_share(self, way: Way) -> float:
        """What the usual proposal takes, if it was not prepared, in passes of plain decoding."""
        usual = max(1, round(self.mean_drafted))
        return self.proposal_ns(way, usual) / max(1.0, self._pass_ns(way, 0, self.num_sequences))

    def proposal_ns(self, way: Way, num_steps: float) -> float:
        """From the request for a proposal that was not prepared to its arrival; of a shape that was never
        tried, as of a chain but for what the host takes. One by the target itself takes passes of its draft.
        """
        if self.is_drafted_by_target:
            width = _TREE_WIDTH if way.num_nodes else self._num_chains
            num_nodes = self.num_sequences * num_steps * width
            return self._load.own_draft_ns(num_steps, num_nodes, is_hosted=way.num_nodes > 0)
        tried = self._proposals.get(way.num_nodes)
        if tried is not None and tried.are_known:
            return tried.draft.predict((num_steps, 1))
        hosted_ns = num_steps * self._told.draft_hosted_ns if way.num_nodes else 0.0
        if self._proposals[CHAIN].are_known:
            return hosted_ns + self._proposals[CHAIN].draft.predict((num_steps, 1))
        return hosted_ns + self._told_ns(num_steps)

    @property
    def is_draft_measured(self) -> bool:
        """Whether what the target's own draft takes was measured beside all else, and not only alone."""
        return not self.is_drafted_by_target or self._load.draft_pass_ns != self._target_told.draft_pass_ns

    def _told_ns(self, num_steps: float) -> float:
        """As the draft said: its first pass, and those after it, which may be a loop on its device."""
        told, num = self._told, self.num_sequences
        first_ns = told.pass_ns(num, num)
        if told.draft_pass_ns:
            return first_ns + told.own_draft_ns(num_steps - 1, num * (num_steps - 1))
        return num_steps * first_ns

    def hit_rate(self, way: Way) -> float:
        """Of rounds whose outcomes are prepared."""
        return self._proposals.get(way.num_nodes, self._proposals[CHAIN]).hits.value

    def round_ns(self, way: Way, num_steps: int, num_sequences: float | None = None) -> float:
        """A round that waits for its proposal, in passes of so many sequences, or as many as now."""
        return self.wait_ns(way, num_steps) + self.unwaited_ns(way, num_steps, num_sequences)

    def unwaited_ns(self, way: Way, num_steps: int, num_sequences: float | None = None) -> float:
        """A round without the wait for its proposal. Queues grow and shrink with the passes."""
        pass_ns = self._pass_ns(way, num_steps, num_sequences or self.num_sequences)
        return max(1.0, self._outside_ns(pass_ns, num_steps))

    def _outside_ns(self, pass_ns: float, num_steps: float) -> float:
        """A pass with what is around it: only rounds that are asked for wait for the network."""
        asked_ns = self._asked_share[self._goes_on(num_steps)] * self._network_ns
        return (1 + self._queue_share) * pass_ns + asked_ns

    def _goes_on(self, num_steps: float) -> bool:
        """Whether rounds with so many draft tokens are such that the target may begin by itself, without a
        proposal from elsewhere."""
        return not num_steps or self.is_drafted_by_target

    def modelled_ns(self, block: RoundBlock) -> float:
        """Of all rounds of a measurement together."""
        if self.is_drafted_by_target and block.way.drafts:
            return self._in_step_ns(block)
        return sum(
            num_rounds * self.round_ns(block.way, num_steps, block.num_sequences)
            for num_steps, num_rounds in block.steps.items()
        )

    def _in_step_ns(self, block: RoundBlock) -> float:
        """Of rounds that the target begins together, once it has drafted as much as any of them has."""
        total, sizes = block.num_rounds, sorted(block.steps)
        num_below, longest = 0, 0.0  # the mean of the greatest of as many rounds as there are streams
        for least, size in zip([0, *sizes], sizes, strict=False):
            longest += (size - least) * (1 - (num_below / total) ** block.num_sequences)
            num_below += block.steps[size]
        mean = sum(size * num for size, num in block.steps.items()) / total
        if block.way.num_nodes:
            mean *= block.way.num_nodes / max(1.0, longest)
        pass_ns = self._load.pass_ns(block.num_sequences, block.num_sequences * (1 + mean))
        return total * max(1.0, self._outside_ns(pass_ns, longest) + self.proposal_ns(block.way, longest))

    def wait_ns(self, way: Way, num_steps: int) -> float:
        """For a proposal: the mean of those that were prepared and those that were not."""
        if not num_steps:
            return 0.0
        requested_ns = self.proposal_ns(way, num_steps)
        if not way.prepares:
            return requested_ns
        proposals = self._proposals.get(way.num_nodes, self._proposals[CHAIN])
        modelled_ns = proposals.late_modelled_ns
        lateness = min(1.0, proposals.late_measured_ns / modelled_ns) if modelled_ns else 1.0
        hit_rate = self.hit_rate(way)
        return hit_rate * lateness * self._late_ns(way, num_steps) + (1 - hit_rate) * requested_ns

    def _late_ns(self, way: Way, num_steps: int) -> float:
        """From the end of a pass to the arrival of a proposal begun at its start.

        It takes one step more: the token after the whole previous proposal has to be guessed as well.
        """
        pass_ns = self._pass_ns(way, num_steps, self.num_sequences)
        return max(0.0, self.proposal_ns(way, num_steps + 1) - pass_ns)

    def _pass_ns(self, way: Way, num_steps: int, num_sequences: float) -> float:
        """A pass in which every sequence has so many draft tokens, or trees so deep."""
        num_tokens = way.num_nodes if way.num_nodes and num_steps else num_steps * self._num_chains
        return self._load.pass_ns(num_sequences, num_sequences * (num_tokens + 1))
