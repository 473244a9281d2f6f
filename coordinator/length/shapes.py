"""Chains or token trees, and of how many nodes: what brings the most tokens a second, found by trials.

Trees are for streams whose tokens are matched. Each shape has measurements of its own, since a tree commits
more tokens with as many passes of the draft, and its verify pass has more tokens; the number of draft tokens
that is chosen there (`draft_length.py`) is the depth of a tree. A trial of a shape begins with a warm-up of
its own, whose rounds are not counted. Pure: no clock, no network.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import sub, truediv

from coordinator.generation import Plan, Round
from coordinator.length.draft_length import AdaptiveLength
from coordinator.length.measurements import ADOPT_RATIO, KEEP_RATIO, MAX_CHOSEN, Chosen, SharedMeasurements
from coordinator.length.trials import Settling, Trials

CHAIN = 0
SHAPES = (CHAIN, 16, 32, 64)
"""Nodes of trees; 0 for chains."""
_LEAST_SHARE = 1.0
"""A shape that was never tried has to promise this share of the rate of chains. What it misses follows from
the measured cost of passes, and its rounds are long. On two cores, where a tree of 16 costs up to twice the
pass of a chain, 0.5 made the first 1,900 tokens of the embedded pair 7 % slower than without trees, 0.8 from
4 % slower to 1 % faster, and the first 1,000 of the widened target 14 % slower; 1.0 made those 7 % slower."""
_TREE_GAIN = 1.25
"""Tokens a round of a tree over a chain's, before one was tried: of 32 nodes, with the embedded pair."""


class SharedShapes:
    """What all streams of a coordinator learn together.

    In a coordinator of several processes one of them learns, from its own streams, and the others follow:
    they adopt what it has learnt and what it tries, so that an option holds for all streams at a time.

    Attributes:
        chains: measurements of chains, which streams that have no trees use as well.
    """

    def __init__(
        self,
        num_streams: Callable[[], int],
        *,
        num_outcomes: int | None = 0,
        may_prepare: Callable[[], bool] = lambda: True,
        num_chains: int = 1,
    ) -> None:
        """Args:
        num_streams, num_outcomes, may_prepare, num_chains: as of `SharedMeasurements`.
        """
        self._num_own_streams = num_streams
        self._num_followed_streams: int | None = None  # None where this process learns
        measured = partial(
            SharedMeasurements, self._num_streams, num_outcomes=num_outcomes, may_prepare=may_prepare
        )
        self.chains = measured(num_chains=num_chains)
        self._measured = {CHAIN: self.chains} | {
            nodes: measured(num_nodes=nodes, chains=self.chains) for nodes in SHAPES[1:]
        }
        self._trials = Trials(SHAPES, CHAIN)

    @property
    def options(self) -> tuple[int, ...]:
        """What holds for all streams at present, and how many trials there were."""
        chosen = self.chosen
        return self.num_nodes, chosen.cap, chosen.num_outcomes, chosen.num_trials

    def exported(self) -> bytes:
        """What this process has learnt, chosen and tries at present, for others to follow."""
        measured = {nodes: each.exported() for nodes, each in self._measured.items()}
        return pickle.dumps((self._num_streams(), measured, self._trials))

    def follow(self, learnt: bytes) -> None:
        """Learn nothing from now on; choose as the process that exported this, as for its streams."""
        self._num_followed_streams, measured, self._trials = pickle.loads(learnt)
        for nodes, each in self._measured.items():
            each.adopt(measured[nodes])
            each.follows = True

    def lead(self) -> None:
        """Learn, beginning with what is known."""
        self._num_followed_streams = None
        for each in self._measured.values():
            each.follows = False

    def _num_streams(self) -> int:
        followed = self._num_followed_streams
        return self._num_own_streams() if followed is None else followed

    def of(self, num_nodes: int) -> SharedMeasurements:
        """The measurements of a shape."""
        return self._measured[num_nodes]

    def of_fixed(self, num_nodes: int) -> SharedMeasurements:
        """Of trees whose size is fixed: as of the smallest shape that has as many nodes."""
        return self._measured[next(nodes for nodes in SHAPES[1:] if nodes >= num_nodes)]

    def begin_round(self) -> int:
        """The shape of a round of any stream that may have trees."""
        return CHAIN if self.chains.is_warming_up else self._trials.enter(self._num_streams()).option

    @property
    def chosen(self) -> Chosen:
        """The latest choices, of the shape at present, and trials of all."""
        chosen = self._measured[self.num_nodes].chosen
        within = sum(measured.chosen.num_trials for measured in self._measured.values())
        return chosen._replace(num_trials=within + self._trials.num_trials)

    @property
    def why_plain(self) -> str:
        """Why all streams are to decode plainly; empty if they are not."""
        return self._measured[self.num_nodes].why_plain

    @property
    def num_nodes(self) -> int:
        """The shape at present, for metrics."""
        return self._trials.look(self._num_streams()).option

    def may_try_lengths(self) -> bool:
        """Whether trials within a shape may go on: two at a time could not tell what made the difference."""
        return not self._trials.look(self._num_streams()).on_trial

    def add_settled(self, num_nodes: int, num_steps: int, elapsed_ns: int) -> None:
        """A round of a settled stream, its draft tokens one after another, and its time."""
        measured = self._measured[num_nodes]
        if measured.follows:
            return
        num_streams = self._num_streams()
        level = self._trials.enter(num_streams)
        if self.chains.is_warming_up or measured.is_warming_up or measured.is_on_trial:
            return
        if not level.add(num_nodes, num_streams, _key(num_nodes, num_steps), elapsed_ns):
            return
        if level.on_trial:
            level.end_trial(num_streams, self._tokens(), adopt=ADOPT_RATIO, keep=KEEP_RATIO)
        else:
            level.begin_trial(num_streams, self._expected())

    def _tokens(self) -> dict[int, float]:
        """That a round of each shape and number of steps commits."""
        return {
            _key(nodes, steps): tokens
            for nodes, measured in self._measured.items()
            for steps, tokens in enumerate(measured.acceptance.tokens()[: MAX_CHOSEN + 1])
        }

    def _expected(self) -> dict[int, float]:
        """Modelled rates: of chains as they are chosen now, of trees from those by `_TREE_GAIN` and by the
        measured cost of their tokens in a pass; minus infinity for what is not to be tried."""
        prospects, costs = self.chains.refresh(), self.chains.costs
        tokens, times = prospects.tokens, prospects.round_times
        most = self.chains.chosen.cap + 1
        expected = {CHAIN: max(map(truediv, tokens[:most], times))}
        others_ns = list(map(sub, times, costs.unwaited_times(MAX_CHOSEN)))  # of a round, but for its pass
        for nodes in SHAPES[1:]:
            unwaited_ns = costs.unwaited_ns(nodes)
            rate = _TREE_GAIN * max(
                tokens[depth] / (others_ns[depth] + unwaited_ns) for depth in range(1, MAX_CHOSEN + 1)
            )
            expected[nodes] = rate if rate > _LEAST_SHARE * expected[CHAIN] else -math.inf
        return expected


class AdaptiveShape:
    """A planner for a stream that may have trees."""

    limit = MAX_CHOSEN

    def __init__(self, shared: SharedShapes) -> None:
        self._shared = shared
        self._lengths: dict[int, AdaptiveLength] = {}
        self._settling = Settling()
        self._num_nodes = CHAIN

    def plan(self) -> Plan:
        """See `generation.Planner`."""
        self._num_nodes = nodes = self._shared.begin_round()
        self._settling.enter(nodes, 0)
        plan = self._length().plan()
        if nodes == CHAIN or plan.num_draft_tokens == 0:
            return plan
        return replace(plan, num_draft_tokens=nodes, max_depth=plan.num_draft_tokens)

    def observe(self, done: Round, elapsed_ns: int) -> None:
        """See `generation.Planner`."""
        is_settled = self._settling.settled is not None
        self._length().learn(done, elapsed_ns, may_try=self._shared.may_try_lengths())
        if is_settled and not done.draft_cost.draft_unavailable:
            self._shared.add_settled(self._num_nodes, min(done.num_steps, MAX_CHOSEN), elapsed_ns)

    def _length(self) -> AdaptiveLength:
        nodes = self._num_nodes
        if nodes not in self._lengths:
            self._lengths[nodes] = AdaptiveLength(self._shared.of(nodes))
        return self._lengths[nodes]


def _key(num_nodes: int, num_steps: int) -> int:
    """Of a kind of rounds, for `Rate`."""
    return num_nodes * (MAX_CHOSEN + 1) + num_steps
