"""One choice for all streams: the way to decode that promises the most tokens a second.

    rate(way) = 1 / (once(way) + min over γ of time(way, γ) / tokens(γ))

Tokens follow from acceptance as measured, times from costs as measured (`round_costs.py`) and from what
rounds that really ran say of the way itself and of ways with the same causes (`ways.py`); `once` is what the
draft takes for prompts, by token that is written. The way with the highest rate is taken. Another one is
tried instead for a block of rounds where what it may bring, should it turn out better, is worth more than
what it is expected to lose. Trials have a budget.

A way holds for all streams, since what one of them does slows the others. Pure: no clock, no network.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from coordinator.generation import Plan, Round
from coordinator.length.round_costs import RoundBlock, RoundCosts
from coordinator.length.ways import CHAIN, MAX_CHOSEN, PLAIN, TREES, WAYS, Deviations, Moment, Way
from specwire.core import Load
from specwire.proposals.estimate.acceptance import SharedAcceptance
from specwire.proposals.estimate.rates import best_length

log = logging.getLogger(__name__)

MAX_OUTCOMES = 32
"""Outcomes that are prepared for where that pays."""
FIRST_LENGTH = 4
"""Draft tokens of a round before costs are known."""

_BLOCK_ROUNDS, _BLOCK_NS = 4, 250_000_000
"""Rounds of each stream that are measured together, and for a stream's time at least: a shorter block shows
how quiet the machine just was."""
_DISAPPOINTING, _EARLY_NS = 0.75, 60_000_000
"""A block that brings less than this share of what plain decoding promises, or another way that was
measured, ends after one round of each stream, and so long. Simulated, sixteen streams on a device that both
models share: a request with a trial has 0.93 of plain decoding, 0.88 with whole blocks."""
_HORIZON_S = 20.0
"""For how long the result of a trial is worth something."""
_SWITCH_ROUNDS = 1.0
"""What a trial loses besides: what was prepared is lost, and some rounds do not count."""
_TRIAL_SHARE, _FIRST_TRIAL_ROUNDS = 0.02, 6.0
"""Share of the time that trials may be expected to lose, and rounds that they may lose besides: plain ones,
where those of a way on trial are longer, or each slow trial would pay for the next."""
CHANGE_RATIO, _LEAST_GAIN = 1.02, 1.03
"""A way, or a stream's length, replaces another one that it promises so many times the rate of: outcomes were
prepared for that. A way that drafts, plain decoding, where nothing is prepared: a draft that works ahead
costs nothing. Where both are alike, changes and trials cost more than they bring: nine points of the embedded
pair, 4 to 64 streams, had 0.97 of plain decoding in the median with 1.0 and 0.99 with 1.05, but with that one
stream under Gumbel coupling drafted nothing."""
_FIRST_GAIN = 1.5
"""Before any block was measured, a way that drafts has to promise so many times plain decoding: passes that
were measured alone take longer beside others, those of a draft most. With sixteen streams of the embedded
pair they took 1.9 times as long, the draft's 2.9 times, and of 1.3 times plain decoding 0.7 was left."""
_UNKNOWN, _KNOWN_ROUNDS = 0.2, 25
"""The logarithm of what a shape brings that was not tried may be wrong by so much, and has half the variance
after so many rounds: the draft learns, too, what trees to grow."""
_SLOW_SHARE = 0.25
"""A draft is slow when a proposal that was not prepared takes this share of a pass.

Measured with the embedded pair: rejection sampling commits 1.08 times the tokens of Gumbel coupling, but 0.46
of its proposals were prepared, and 0.86 under Gumbel coupling. With a wait of w passes for all others,
(1 + 0.54 w) / (1 + 0.14 w) is over 1.08 from w = 0.2 on.
"""
_SHARE_ROUNDS = 100
"""Rounds that what streams get of an average text's tokens is averaged over, about."""
_SHARE_LASTS_S = 60.0
"""Seconds of plain decoding after which what is known of that has fallen to a third. It is low after texts
have changed, and nothing would correct it where it rules out that anything is drafted."""
_REFRESH_ROUNDS = 8
"""Rounds between two updates of the prospects, which all streams read in every round; with more than 32
streams, a quarter of them."""
_LEARNT_ROUNDS = 32
"""Costs are learnt from so many rounds while each stream has one: what a pass costs is alike for all."""
_NEW_OCTAVES = 0.5
"""The choice is made anew once the number of streams has changed by so many doublings."""


@dataclass(frozen=True, eq=False, slots=True)
class Prospects:
    """What rounds of a way promise to an average stream: each [MAX_CHOSEN + 1], by draft tokens in a row."""

    tokens: list[float]  # that a round commits
    times: list[float]  # nanoseconds of a round; [0] of one without draft tokens beside others
    unwaited: list[float]  # of rounds that do not wait for their proposals
    plain_ns: float  # a round of plain decoding, of all streams
    hit_rate: float = 0.0  # of those that do not wait
    longest: int = MAX_CHOSEN  # draft tokens in a row that a stream may choose
    plans: dict[tuple[int, int, bool], Plan] = field(default_factory=dict)  # that follow, of all streams

    def rate(self, most: int) -> float:
        """Most tokens a nanosecond with 1 to `most` draft tokens."""
        lengths = range(1, min(most, self.longest) + 1)
        waited = max(self.tokens[n] / self.times[n] for n in lengths)
        if not self.hit_rate:
            return waited
        return max(waited, *((1 + self.hit_rate * (self.tokens[n] - 1)) / self.unwaited[n] for n in lengths))


@dataclass(frozen=True, eq=False)
class Among:
    """What a stream may choose from; streams that may choose from the same have the same object.

    Attributes:
        ways: the first is taken before costs are known.
        most: draft tokens one after another, of whoever judges them.
        is_fixed: there are always so many.
    """

    ways: tuple[Way, ...]
    most: int = MAX_CHOSEN
    is_fixed: bool = False


class Compared(NamedTuple):
    """A way, and tokens a second of a stream: expected now, and when it was last measured (0 if never)."""

    way: Way
    is_chosen: bool
    expected_rate: float
    measured_rate: float


@dataclass
class _Held:
    """The way of those who choose among the same.

    Attributes:
        way: at present.
        best: of which the most is expected; another one than `way` during a trial.
        block: the rounds of `way` so far.
        num_streams: that ran when it began.
        least_rate: tokens a nanosecond of a stream; where `way` brings fewer, its block ends early.
    """

    way: Way
    best: Way
    block: RoundBlock
    num_streams: int
    least_rate: float = 0.0


class SharedChoice:
    """Learns from the rounds of all streams of a coordinator, and chooses for them. Times in nanoseconds.

    Attributes:
        acceptances: of shapes that were tried, by nodes of a tree, 0 for chains.
        are_known: whether costs are, so that there is a choice.
        num_trials: begun so far.
        why_not: the case against drafting by the latest figures, for rounds that are planned without.

    Args:
        num_streams: that run now.
        num_outcomes: to prepare for; None finds out what pays.
        may_prepare: whether any may be prepared for at present.
        num_chains: of a round, whose length is meant by draft tokens then.
        told: what passes of the target and of the draft cost, as each service measured before the first
            request; None of what is not known.
    """

    def __init__(
        self,
        num_streams: Callable[[], int],
        *,
        num_outcomes: int | None = 0,
        may_prepare: Callable[[], bool] = lambda: True,
        num_chains: int = 1,
        told: Callable[[], tuple[Load | None, Load | None]] = lambda: (None, None),
    ) -> None:
        self._num_running, self._may_prepare, self._num_outcomes = num_streams, may_prepare, num_outcomes
        self._told = told
        self.acceptances: dict[int, SharedAcceptance] = {}
        self.costs, self._deviations, self.are_known = RoundCosts(num_chains), Deviations(), False
        self._amongs: dict[tuple[Any, ...], Among] = {}
        self._held: dict[Among, _Held] = {}
        self._slowness: dict[Way, float] = {}  # measured over modelled time, by way
        self._measured: dict[Way, float] = {}  # tokens a nanosecond of a stream, in the last block
        self._prospects: dict[Way, Prospects] = {}
        self._share = 1.0  # see `_learn_share`
        # Seconds: so far; that trials may lose; that they were expected to lose.
        self._now = self._earned = self._spent = 0.0
        self._num_rounds = self._refresh_at = self._learn_at = self.num_trials = 0
        self._num_scaled = 0  # streams that costs were last scaled to
        self.why_not = ""

    # --- for planners -------------------------------------------------------------------------------

    def acceptance(self, num_nodes: int) -> SharedAcceptance:
        """Of a shape that is tried now."""
        if num_nodes not in self.acceptances:
            tried, ratio = self._like(num_nodes)
            self.acceptances[num_nodes] = tried.of_trees(ratio)
        return self.acceptances[num_nodes]

    def among(self, *, has_trees: bool = False, most: int = MAX_CHOSEN) -> Among:
        """What a stream chooses from whose length is not fixed."""
        first = Way(True, CHAIN, bool(self._num_outcomes))
        others = (way for way in WAYS if way != first and (has_trees or not way.num_nodes))
        return self._same(Among((first, *others), most))

    def among_fixed(self, num_steps: int, num_nodes: int) -> Among:
        """What a stream chooses from whose length is fixed: whether outcomes are prepared."""
        nodes = next((size for size in (CHAIN, *TREES) if size >= num_nodes), TREES[-1])
        ways = tuple(Way(True, nodes, prepares) for prepares in (False, True))
        return self._same(Among(ways[:: -1 if self._num_outcomes else 1], num_steps, is_fixed=True))

    def _same(self, among: Among) -> Among:
        return self._amongs.setdefault((among.ways, among.most, among.is_fixed), among)

    def begin_round(self, among: Among) -> tuple[Way, int]:
        """The way of a round of any stream, and how many outcomes are prepared."""
        if not self.are_known:
            self._gather()
        held = self._held.get(among)
        if held is None or self._num_streams_changed(held) or (held.way.prepares and not self._may_prepare()):
            held = self._held[among] = self._entered(among, held)
        outcomes = MAX_OUTCOMES if self._num_outcomes is None else self._num_outcomes
        return held.way, outcomes if held.way.prepares else 0

    def on_trial(self, among: Among) -> bool:
        """Whether the way at present is tried though less is expected of it."""
        held = self._held[among]
        return held.way != held.best

    def prospects(self, way: Way) -> Prospects:
        """Of a way, updated if there were enough rounds since the last time."""
        if self._num_rounds >= self._refresh_at:
            usual = max(_REFRESH_ROUNDS, self._num_streams // 4)
            self._refresh_at = self._num_rounds + min(usual, 1 + self._num_rounds // 2)
            self._prospects.clear()
        found = self._prospects.get(way)
        if found is None:
            found = self._prospects[way] = self._promised(way)
        return found

    def add(self, done: Round, way: Way, elapsed_ns: int) -> bool:
        """Count a round of any stream, and learn from it if its turn has come; says whether it has."""
        num_streams = self._num_streams
        self._num_rounds += 1
        self._now += elapsed_ns / 1e9 / num_streams
        if self.are_known and self._num_rounds < self._learn_at:
            return False
        # An odd number: not the rounds of the same streams each time.
        self._learn_at = self._num_rounds + (num_streams // _LEARNT_ROUNDS | 1)
        self.costs.add(done, way)
        if not self.are_known:
            self._gather()
        return True

    def _gather(self) -> None:
        """What the services say of their costs; once enough is known, all ways are compared anew."""
        self.costs.know(*self._told())
        self.are_known = self.costs.are_known
        if self.are_known:
            self._held.clear()

    def add_settled(
        self, among: Among, way: Way, num_steps: int, num_tokens: int, elapsed_ns: int, is_plain: bool
    ) -> None:
        """A round of a stream that has settled under a way, as `RoundBlock.add` takes it."""
        held = self._held.get(among)
        if not self.are_known or held is None or way != held.way:
            return
        block, num_streams = held.block, self._num_streams
        block.add(num_steps, num_tokens, elapsed_ns, is_plain=is_plain)
        self._earned += _TRIAL_SHARE * elapsed_ns / 1e9 / num_streams
        disappoints = block.num_tokens < held.least_rate * block.time_ns
        rounds, least_ns = (1, _EARLY_NS) if disappoints else (_BLOCK_ROUNDS, _BLOCK_NS)
        if block.num_rounds >= rounds * num_streams and block.time_ns >= least_ns * num_streams:
            if self._open(among)[1:]:
                self._learn_block(block, among)
                self._held[among] = self._decided(among, held)
            else:  # nothing to choose
                held.block = RoundBlock(way)

    def _learn_block(self, block: RoundBlock, among: Among) -> None:
        block.num_sequences = self.costs.num_sequences
        if block.is_plain:
            block.way = PLAIN  # as streams chose for their own texts
            lost = 1 - math.exp(-block.time_ns / 1e9 / self._num_streams / _SHARE_LASTS_S)
            self._share += lost * (1 - self._share)
        elif not among.is_fixed:
            self._learn_share(block)
        self._measured[block.way] = block.num_tokens / block.time_ns
        ratio = block.time_ns / self.costs.modelled_ns(block)
        self._deviations.add(block.way, ratio, self._moment)

    def _learn_share(self, block: RoundBlock) -> None:
        """What streams get of what an average text would have brought: each drafts as suits its own."""
        way, tokens = block.way, self._tokens(block.way.num_nodes)
        best = max(tokens[n] / self.costs.round_ns(way, n) for n in range(1, self._longest(way, tokens) + 1))
        share = block.num_tokens / self.costs.modelled_ns(block) / best
        weight = block.num_rounds / (block.num_rounds + _SHARE_ROUNDS)
        self._share += weight * (share - self._share)

    # --- the choice ---------------------------------------------------------------------------------

    def _entered(self, among: Among, before: _Held | None) -> _Held:
        """With a new number of streams, or for the first time: the way of which the most is expected, unless
        another one was to be tried."""
        if self._num_scaled:  # once, however many choose among others
            self.costs.rescale(self._num_streams, self._num_scaled)
        self._num_scaled = self._num_streams
        ways = self._open(among)
        if not self.are_known:
            way = before.best if before and before.best in ways else ways[0]
            return _Held(way, way, RoundBlock(way), self._num_streams)
        rates, _ = self._rates(among, ways)
        best = ways[int(np.argmax(self._merits(ways, rates)))]
        is_tried = before is not None and before.way != before.best and before.way in ways
        return self._taken(before.way if before and is_tried else best, best, ways, rates)

    def _decided(self, among: Among, held: _Held) -> _Held:
        """At the end of a block: the best way, or one to try."""
        ways = self._open(among)
        rates, covariance = self._rates(among, ways)
        merits = self._merits(ways, rates)
        known: Sequence[int] = range(len(ways))
        if self.costs.is_drafted_by_target:  # not for a promise alone
            known = [i for i in known if ways[i] in self._measured] or known
        best = max(known, key=merits.__getitem__)
        if held.best in ways and merits[best] - merits[ways.index(held.best)] < math.log(CHANGE_RATIO):
            best = ways.index(held.best)
        if held.block.is_plain and held.way.drafts and not held.way.prepares and PLAIN in ways:
            best = ways.index(PLAIN)  # no stream drafted: what more it promises has to be tried
        tried = self._worth_a_trial(ways, merits, covariance, best, held.block)
        self.num_trials += tried != best and ways[tried] != held.way
        if log.isEnabledFor(logging.DEBUG):
            compared = sorted(zip(rates, ways, strict=True), reverse=True)
            log.debug(
                "%.3f ms a round of %s, %.2f times as modelled; now %s; expected tokens/s over the best: %s",
                held.block.time_ns / 1e6 / held.block.num_rounds,
                held.way,
                held.block.time_ns / self.costs.modelled_ns(held.block),
                ways[tried],
                ", ".join(f"{way} {math.exp(rate - rates[best]):.2f}" for rate, way in compared),
            )
        return self._taken(ways[tried], ways[best], ways, rates)

    def _merits(self, ways: Sequence[Way], rates: Sequence[float]) -> list[float]:
        """The logarithms of rates, as they are compared with one another."""
        least = 1.0 if any(way.prepares for way in ways) else _LEAST_GAIN
        if not (self._measured or self.costs.is_draft_measured):
            least = _FIRST_GAIN
        return [rate - way.drafts * math.log(least) for way, rate in zip(ways, rates, strict=True)]

    def _worth_a_trial(
        self, ways: Sequence[Way], rates: Sequence[float], covariance: Any, best: int, block: RoundBlock
    ) -> int:
        """Which to take next: the one of which a trial is worth most, or the best one.

        A trial that is too dear now is saved up for: a cheaper one is worth less.
        """
        block_s, round_s = block.time_ns / 1e9 / self._num_streams, block.time_ns / 1e9 / block.num_rounds
        takes_turns = self.costs.is_drafted_by_target or not self._may_prepare()
        worth, tried, cost = 0.0, best, 0.0
        for i, rate in enumerate(rates):
            spread = math.sqrt(max(0.0, covariance[i, i] + covariance[best, best] - 2 * covariance[i, best]))
            gain = _expected_excess(rate - rates[best], spread)
            loss = (gain - (rate - rates[best])) * block_s + _SWITCH_ROUNDS * round_s
            if takes_turns and ways[i].drafts != block.way.drafts:  # now, or when it drafts again
                loss += self.costs.catch_up_ns / 1e9
            if i != best and _HORIZON_S * gain - loss > worth:
                worth, tried, cost = _HORIZON_S * gain - loss, i, loss
        first_s = _FIRST_TRIAL_ROUNDS * min(round_s, self._promised(PLAIN).plain_ns / 1e9)
        if cost > first_s + self._earned - self._spent:
            return best
        self._spent += cost
        return tried

    def _taken(self, way: Way, best: Way, ways: Sequence[Way], rates: Sequence[float]) -> _Held:
        """A way that begins now, among those of which so much is expected."""
        self._prospects.clear()
        self.why_not = self._reason()
        known = {PLAIN, *self._measured} - {way}
        others = [rate for other, rate in zip(ways, rates, strict=True) if other in known]
        least_rate = _DISAPPOINTING * math.exp(max(others, default=-math.inf))
        return _Held(way, best, RoundBlock(way), self._num_streams, least_rate)

    def _open(self, among: Among) -> list[Way]:
        """Ways that may be taken now."""
        if self._num_outcomes == 0 or not self._may_prepare():
            return [way for way in among.ways if not way.prepares]
        if self._num_outcomes is not None:
            return [way for way in among.ways if way.prepares or not way.drafts]
        return list(among.ways)

    def _rates(self, among: Among, ways: Sequence[Way]) -> tuple[list[float], Any]:
        """Expected logarithm of tokens a nanosecond by way, and its covariance."""
        if self.costs.is_drafted_by_target and not self._measured:
            self._deviations = Deviations(in_target=True)
        slowness, covariance = self._deviations.of([PLAIN, *ways], self._moment)
        self._slowness.update(zip([PLAIN, *ways], np.exp(slowness).tolist(), strict=True))
        if among.is_fixed:
            rates = [-math.log(self._slowness[way] * self.costs.round_ns(way, among.most)) for way in ways]
        else:
            rates = [math.log(self._expected_rate(way, among.most)) for way in ways]
        tried = [self.acceptances.get(way.num_nodes) for way in ways]
        known = [0.0 if each is None else each.num_added / _KNOWN_ROUNDS for each in tried]
        unknown = [way.drafts * _UNKNOWN**2 / (1 + each) for way, each in zip(ways, known, strict=True)]
        return rates, covariance[1:, 1:] + np.diag(unknown)

    def _expected_rate(self, way: Way, most: int = MAX_CHOSEN) -> float:
        """Tokens a nanosecond of a stream."""
        promised = self._promised(way)
        if not way.drafts:
            return 1 / promised.plain_ns
        return 1 / (self.costs.once_ns + 1 / (self._share * promised.rate(most)))

    def _promised(self, way: Way) -> Prospects:
        costs, slowness, tokens = self.costs, self._slowness.get(way, 1.0), self._tokens(way.num_nodes)
        plain_ns = self._slowness.get(PLAIN, 1.0) * costs.round_ns(PLAIN, 0)
        if PLAIN not in self._measured:  # passes seem dearer while drafts take turns with them
            plain_ns = min(plain_ns, costs.alone_ns(self._num_streams) or plain_ns)
        lengths = range(1, MAX_CHOSEN + 1)
        unwaited = [plain_ns, *(slowness * costs.unwaited_ns(way, n) for n in lengths)]
        drafted = [unwaited[n] + slowness * costs.wait_ns(way, n) for n in lengths]
        # Where the target drafts for all streams after a pass, one with fewer draft tokens waits for others,
        # for as many as a chain may have, or, where that is not limited, usually has.
        others = 1 - 1 / self._num_streams if way.drafts and costs.is_drafted_by_target else 0.0
        longest = self._longest(way, tokens)
        usual = longest if longest < MAX_CHOSEN else min(MAX_CHOSEN, max(1, round(costs.mean_drafted)))
        times = [each + others * max(0.0, drafted[usual - 1] - each) for each in [plain_ns, *drafted]]
        hit_rate = costs.hit_rate(way) if way.prepares else 0.0
        return Prospects(tokens, times, unwaited, plain_ns, hit_rate, longest)

    def _longest(self, way: Way, tokens: Sequence[float]) -> int:
        """Most draft tokens of a stream in a row. Where the target drafts for all streams together, each
        waits for the longest of all: no chain exceeds what suits an average text."""
        if way.num_nodes or self._num_streams == 1 or not self.costs.is_drafted_by_target:
            return MAX_CHOSEN
        return best_length(tokens, [self.costs.round_ns(way, n) for n in range(MAX_CHOSEN + 1)], least=1)

    def _like(self, num_nodes: int) -> tuple[SharedAcceptance, float]:
        """Of a shape, or of the one that is known best, and how many times as many nodes are asked for."""
        if not self.acceptances:
            return SharedAcceptance(), max(1, num_nodes)
        rounds = {nodes: each.num_added for nodes, each in self.acceptances.items()}
        known = num_nodes if num_nodes in rounds else max(rounds, key=rounds.__getitem__)
        return self.acceptances[known], max(1, num_nodes) / max(1, known)

    def _tokens(self, num_nodes: int) -> list[float]:
        """Of a round with 0, 1, ... draft tokens one after another, as a shape has them."""
        tried, ratio = self._like(num_nodes)
        return tried.tokens(ratio)

    def _num_streams_changed(self, held: _Held) -> bool:
        before, now = held.num_streams, self._num_streams
        return before != now and abs(math.log2(now / before)) >= _NEW_OCTAVES

    # --- what is said of it -------------------------------------------------------------------------

    @property
    def chosen(self) -> Way:
        """The latest choice of streams whose length is open, or of any."""
        held = sorted(self._held.items(), key=lambda item: item[0].is_fixed)
        return held[0][1].way if held else Way(True)

    @property
    def longest(self) -> int:
        """Most draft tokens one after another at present."""
        return self._promised(self.chosen).longest if self.chosen.drafts else 0

    @property
    def num_outcomes(self) -> int:
        """That are prepared for at present."""
        if not self.chosen.prepares or not self._may_prepare():
            return 0
        return MAX_OUTCOMES if self._num_outcomes is None else self._num_outcomes

    @property
    def is_draft_far(self) -> bool:
        """Whether waiting for proposals costs more than what preparing for many of them takes."""
        way = self.chosen
        return way.prepares and self.are_known and self.costs.proposal_share(way) > _SLOW_SHARE

    def at(self, num_streams: int) -> SharedChoice:
        """The same with so many streams that run in one batch: for what it would choose."""
        other = copy.copy(self)
        other._num_running, other.costs = lambda: num_streams, copy.copy(self.costs)
        other.costs.num_sequences = float(num_streams)
        other._slowness, other._prospects = {}, {}
        return other

    def expected(self) -> list[Compared]:
        """As `compared`; the first is the one that would be chosen."""
        found = sorted(self.compared(), key=lambda each: -each.expected_rate)
        return [each._replace(is_chosen=not place) for place, each in enumerate(found)]

    def compared(self) -> list[Compared]:
        """All ways that streams choose among whose length is open; none before costs are known."""
        if not self.are_known:
            return []
        among = next((among for among in self._held if not among.is_fixed), self.among())
        held, ways = self._held.get(among), self._open(among)
        rates, _ = self._rates(among, ways)
        return [
            Compared(
                way,
                held is not None and way == held.way,
                1e9 * math.exp(rate),
                1e9 * self._measured.get(way, 0.0),
            )
            for way, rate in zip(ways, rates, strict=True)
        ]

    @property
    def why_plain(self) -> str:
        """Why an average stream decodes plainly; empty if it does not."""
        best = next((held.best for among, held in self._held.items() if not among.is_fixed), None)
        if not self.are_known or best is None:
            return ""
        prospects = self.prospects(best)
        times = prospects.unwaited if best.prepares else prospects.times
        lengths = range(1, prospects.longest + 1 if best.drafts else 1)
        pays = any(prospects.tokens[n] / times[n] > 1 / prospects.plain_ns for n in lengths)
        return "" if pays else self.why_not

    def _reason(self) -> str:
        """What a proposal costs and brings; and what is expected of the best way that drafts, once one was
        measured beside plain decoding."""
        if not self.are_known:
            return ""
        share, tokens = self.costs.proposal_share(Way(True)), self._tokens(CHAIN)
        parts = [f"a proposal takes {share:.1f} of a pass"] if round(share, 1) else []
        length = min(max(1, round(self.costs.mean_drafted)), len(tokens) - 1)
        parts.append(f"{tokens[length] - 1:.1f} of its tokens are accepted")
        drafted = [self._expected_rate(way) for way in self._measured if way.drafts]
        if PLAIN in self._measured and drafted:
            ratio = max(drafted) / self._expected_rate(PLAIN)
            parts.append(f"trials were {ratio:.2f} times as fast as plain decoding")
        return f"does not pay here: {', '.join(parts)}"

    @property
    def _moment(self) -> Moment:
        return Moment(self._now, self._num_streams, self.costs.pass_ns)

    @property
    def _num_streams(self) -> int:
        return max(1, self._num_running())


def _expected_excess(mean: float, spread: float) -> float:
    """Expected value of max(0, x) for a normally distributed x."""
    if spread <= 0:
        return max(0.0, mean)
    z = mean / spread
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return spread * density + mean * 0.5 * math.erfc(-z / math.sqrt(2))
