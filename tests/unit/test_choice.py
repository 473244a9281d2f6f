"""The number of draft tokens: the closed form, what is learnt from rounds, and trials of both modes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.cost import CallOutcome, Cost
from coordinator.generation import Plan, Round
from coordinator.length.choice import Prospects, SharedChoice
from coordinator.length.planners import AdaptiveLength, FixedLength, Length, choose
from coordinator.length.ways import CHAIN, MAX_CHOSEN, PLAIN, WAYS, Deviations, Moment, Way
from specwire.core import Load, ModelInfo, Outcome, Proposal, Verdict
from specwire.proposals.estimate.costs import CostModel
from specwire.proposals.estimate.rates import best_length


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("draft_cost", [0.01, 0.1, 0.5])
def test_the_best_length_is_that_of_the_closed_form(alpha: float, draft_cost: float) -> None:
    """Leviathan et al. 2023, theorem 3.8: (1 - α^(γ+1)) / ((1 - α)(γc + 1)) at its largest."""
    lengths = np.arange(MAX_CHOSEN + 1)
    speedup = (1 - alpha ** (lengths + 1)) / ((1 - alpha) * (lengths * draft_cost + 1))
    times = [1 + draft_cost * n for n in lengths]
    tokens = np.cumsum(alpha**lengths).tolist()
    assert best_length(tokens, times) == int(speedup.argmax())


def round_of(num_drafted: int, num_accepted: int, draft: Cost, verify: Cost) -> Round:
    accepted = Outcome(range(num_accepted), 0)
    return Round(Proposal(0, [0] * num_drafted), Verdict(0, []), accepted, draft, verify)


class Machine:
    """A made-up system in which many streams decode in turn; times in nanoseconds.

    Draft steps and passes cost what they say; `sharing` is how much slower passes get as soon as anybody
    drafts, as where both share a processor, and `says_slower` whether the target says so of its passes. With
    `is_late` no proposal arrives while it is waited for.
    """

    def __init__(self, num_streams: int, *, base: float, sequence: float, token: float, step: float) -> None:
        self.rng = np.random.default_rng(num_streams)
        told = Load(0, num_streams, int(base), int(sequence), int(token)), Load(0, 1, int(step))
        self.says_slower = self.is_late = False
        self.shared = SharedChoice(
            lambda: num_streams, told=lambda: told if self.says_slower else (None, None)
        )
        self.streams = [AdaptiveLength(self.shared) for _ in range(num_streams)]
        self.base, self.sequence, self.token, self.step = base, sequence, token, step
        self.sharing = 1.0
        self.tokens, self.time = 0, 0.0
        self.chosen: Counter[int] = Counter()

    def run(self, num_rounds: int, alpha: float) -> float:
        """Tokens a nanosecond and stream over these rounds."""
        self.tokens, self.time, self.chosen = 0, 0.0, Counter()
        for _ in range(num_rounds):
            self._round(alpha)
        return self.tokens / self.time / len(self.streams)

    def ideal(self, alpha: float) -> float:
        """The most that a fixed number could bring."""
        return max(self._rate(n, alpha) for n in range(MAX_CHOSEN + 1))

    def plain(self) -> float:
        return self._rate(0, 0.0)

    def _rate(self, n: int, alpha: float) -> float:
        expected = sum(alpha**i for i in range(n + 1))
        time = self.pass_time(len(self.streams), len(self.streams) * (n + 1))
        return expected / (n * self.step + time * (self.sharing if n else 1))

    def pass_time(self, num_sequences: int, num_tokens: int) -> float:
        return self.base + self.sequence * num_sequences + self.token * num_tokens

    def _round(self, alpha: float) -> None:
        num = len(self.streams)
        lengths = [stream.plan().num_draft_tokens for stream in self.streams]
        self.chosen.update(lengths)
        sharing = self.sharing if any(lengths) else 1.0
        draft = self.step * max(lengths)
        lengths = [0] * num if self.is_late else lengths
        verify = self.pass_time(num, sum(lengths) + num) * sharing
        noise = self.rng.lognormal(0, 0.05)
        said = sharing if self.says_slower else 1.0
        load = Load(0, num, int(said * self.base), int(said * self.sequence), int(said * self.token))
        for stream, length in zip(self.streams, lengths, strict=True):
            accepted = int(np.argmin([*(self.rng.random(length) < alpha), False]))
            draft_ns = int(self.step * length * noise)
            outcome = CallOutcome.TIMED_OUT if self.is_late else CallOutcome.ASKED
            draft_cost = Cost(outcome, wall_ns=draft_ns, forward_ns=draft_ns, num_prefill_tokens=1)
            verify_cost = Cost(wall_ns=int(verify * noise), forward_ns=int(verify * noise), load=load)
            done = round_of(length, accepted, draft_cost, verify_cost)
            stream.observe(done, int((draft + verify) * noise))
            self.tokens += accepted + 1
        self.time += (draft + verify) * noise


CHEAP = {"base": 30e6, "sequence": 0.1e6, "token": 0.05e6, "step": 2e6}


@pytest.mark.parametrize(("sharing", "alpha", "step"), [(1.0, 0.2, 10e6), (4.0, 0.7, 2e6)])
def test_where_drafting_does_not_pay_plans_say_what_it_costs_and_brings(
    sharing: float, alpha: float, step: float
) -> None:
    """Where three draft steps take a pass; and where devices are shared, of which the model knows nothing."""
    machine = Machine(1, base=27e6, sequence=0, token=0.3e6, step=step)
    machine.sharing = sharing
    machine.run(1000, alpha)
    why_plain, plan = machine.shared.why_plain, machine.streams[0].plan()
    assert (plan.num_draft_tokens, plan.why_plain) == (0, why_plain)
    figures = r"a proposal takes \d\.\d of a pass, \d\.\d of its tokens are accepted"
    trials = r"trials were \d\.\d\d times as fast as plain decoding"
    assert re.fullmatch(f"does not pay here: {figures}, {trials}", why_plain)


@pytest.mark.sample(3)
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("num_streams", [1, 8])
def test_it_comes_near_the_best_fixed_number(alpha: float, num_streams: int) -> None:
    machine = Machine(num_streams, **CHEAP)
    machine.run(400 if num_streams == 1 else 150, alpha)
    assert machine.run(1500 // num_streams, alpha) > 0.86 * machine.ideal(alpha)


@pytest.mark.slow
def test_it_falls_as_the_batch_fills_and_ends_at_zero() -> None:
    """Tokens that cost what a plain one costs bring nothing any more."""
    chosen = []
    for num_streams in (1, 16, 256):
        machine = Machine(num_streams, base=30e6, sequence=0, token=0.3e6, step=1e6)
        machine.run(150, 0.7)
        rate = machine.run(300, 0.7)
        assert rate > 0.97 * machine.plain()
        chosen.append(machine.chosen.most_common(1)[0][0])
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 4
    assert chosen[-1] <= 1


def test_a_machine_that_cannot_do_both_at_once_decodes_plainly() -> None:
    """No cost model sees it coming: the pass is slow because of concurrent drafting."""
    machine = Machine(4, **CHEAP)
    machine.sharing = 4.0
    machine.run(300, 0.6)
    assert machine.run(1500, 0.6) > 0.98 * machine.plain()
    assert machine.chosen[0] > 0.95 * machine.chosen.total()


def test_plain_decoding_is_believed_to_cost_what_it_did_before_drafts_ran_beside_it() -> None:
    """Passes take three times as long meanwhile: by these plain decoding seems slower than drafts."""
    machine = Machine(4, base=3e6, sequence=0, token=0.3e6, step=0.4e6)
    machine.sharing, machine.says_slower = 3.0, True
    assert machine.run(200, 0.95) > 0.8 * machine.plain()


def test_a_way_that_disappoints_is_left_after_a_round_of_each_stream() -> None:
    """And the one round before it, which has the prompts in it; one that is as good as promised is kept."""

    def num_drafted(sharing: float) -> int:
        machine = Machine(16, base=6e6, sequence=0.5e6, token=0.2e6, step=0.5e6)
        machine.sharing = sharing
        return sum(machine.run(1, 0.6) > 0 and machine.chosen[0] == 0 for _ in range(8))

    assert num_drafted(5.0) == 2
    assert num_drafted(1.0) == 8


def test_rounds_whose_proposals_are_late_are_not_taken_for_plain_decoding() -> None:
    machine = Machine(1, **CHEAP)
    machine.run(20, 0.8)
    assert machine.shared.why_plain == machine.streams[0].plan().why_plain == ""
    machine.is_late = True
    machine.run(20, 0.8)
    measured = {each.way: each.measured_rate for each in machine.shared.compared()}
    assert measured[Way(True)]
    assert not measured[PLAIN]


def test_it_speculates_again_when_that_pays_again() -> None:
    """Five minutes later, in rounds that take ten times as long as those of other tests."""
    machine = Machine(4, **{name: 10 * cost for name, cost in CHEAP.items()})
    machine.sharing = 4.0
    machine.run(50, 0.6)
    machine.sharing = 1.0
    machine.run(1000, 0.6)
    assert machine.run(300, 0.6) > 0.9 * machine.ideal(0.6)


def test_where_no_stream_drafts_though_that_promises_more_it_is_tried() -> None:
    """Hard texts for two minutes, and easy ones since."""
    machine = Machine(1, **CHEAP | {"step": 6e6})
    machine.run(5000, 0.05)
    machine.run(5000, 0.6)
    assert machine.run(2000, 0.6) > 0.85 * machine.ideal(0.6)


def test_what_streams_got_of_texts_that_have_changed_does_not_rule_drafts_out() -> None:
    """Until all were accepted, nothing was learnt for a while, and drafts brought far less than expected."""
    machine = Machine(1, base=30e6, sequence=0, token=0.06e6, step=1.8e6)
    machine.sharing = 3.0
    machine.run(4020, 1.0)
    machine.sharing = 1.5
    machine.run(4020, 0.3)
    machine.run(5000, 0.8)
    assert machine.run(1000, 0.8) > 0.9 * machine.ideal(0.8)


def test_many_lengths_that_are_fixed_are_one_change_of_the_number_of_streams() -> None:
    streams = [0] * 8
    shared = SharedChoice(lambda: len(streams))
    planners = [FixedLength(length, shared) for length in range(1, 9)]
    load, asked = Load(0, 8, 10_000_000), Cost(CallOutcome.ASKED, wall_ns=1000, num_prefill_tokens=1)
    for _ in range(20):
        for planner in planners:
            length = planner.plan().num_draft_tokens
            planner.observe(round_of(length, 0, asked, Cost(load=load)), 20_000_000)
    del streams[4:]
    for planner in planners[:4]:
        planner.plan()
    assert shared.costs.num_sequences == pytest.approx(4, rel=0.01)


def test_a_target_whose_passes_cost_in_proportion_to_their_tokens_is_measured() -> None:
    costs = CostModel(2)
    assert costs.known_base == 0
    costs.assume([((1, 1), 10e6), ((1, 5), 52e6), ((1, 17), 190e6), ((8, 8), 83e6)])
    assert costs.base == 0
    assert costs.known_base == 1


def test_hard_text_is_noticed_within_a_few_rounds_and_forgotten_again() -> None:
    machine = Machine(1, base=30e6, sequence=0, token=0.5e6, step=6e6)
    machine.run(1000, 0.85)
    easy = machine.chosen.most_common(1)[0][0]
    machine.run(8, 0.0)
    machine.run(4, 0.0)
    assert max(machine.chosen) <= easy - 2
    machine.run(40, 0.85)
    machine.run(60, 0.85)
    assert machine.chosen.most_common(1)[0][0] >= easy - 1


def far_round(plan: Plan, num_accepted: int) -> Round:
    """A pass of 30 ms, and a proposal that took 80 ms more than its steps unless it was not waited for."""
    num_drafted = plan.num_draft_tokens if plan.patience_s else 0
    steps_ns, far_ns, pass_ns = 2_000_000 * num_drafted, 80_000_000, 30_000_000
    draft = Cost()
    if num_drafted:
        draft = Cost(CallOutcome.ASKED, forward_ns=steps_ns, network_ns=far_ns, num_prefill_tokens=1)
        draft.wall_ns = steps_ns + far_ns
    verify = Cost(forward_ns=pass_ns, wall_ns=pass_ns, load=Load(0, 1, pass_ns, 0, 0))
    return round_of(num_drafted, min(num_accepted, num_drafted), draft, verify)


def far_plans(stream: AdaptiveLength, num_rounds: int, num_accepted: int) -> list[Plan]:
    """Of rounds of which each takes as long as it costs."""
    plans = []
    for _ in range(num_rounds):
        plans.append(stream.plan())
        done = far_round(plans[-1], num_accepted)
        stream.observe(done, done.draft_cost.wall_ns + done.verify_cost.wall_ns)
    return plans


@pytest.mark.parametrize(("num_accepted", "waits"), [(0, False), (16, True)])
def test_a_far_draft_is_waited_for_where_the_text_is_easy(num_accepted: int, waits: bool) -> None:
    """And asked all the same where it is hard, which costs no time."""
    plans = far_plans(AdaptiveLength(SharedChoice(lambda: 1, num_outcomes=16)), 16, num_accepted)
    assert all(plan.patience_s for plan in plans[:3]), "nothing is known yet"
    drafted = [plan for plan in plans[12:] if plan.num_draft_tokens]
    assert {bool(plan.patience_s) for plan in drafted} == {waits}
    assert all(plan.num_outcomes for plan in drafted)


def plans_where_preparing_slows_the_target(shared: SharedChoice) -> list[Plan]:
    """As on a processor that both share. A proposal takes a third of a pass."""
    stream, plans = AdaptiveLength(shared), []
    for _ in range(120):
        plans.append(plan := stream.plan())
        num, prepared = plan.num_draft_tokens, plan.num_outcomes > 0
        draft, verify = (0, 180_000_000) if prepared else (2_500_000 * num, 60_000_000)
        outcome = CallOutcome.READY if prepared else CallOutcome.ASKED
        draft_cost = Cost(outcome, wall_ns=draft, forward_ns=draft, num_prefill_tokens=1)
        verify_cost = Cost(wall_ns=verify, forward_ns=verify, load=Load(0, 1, verify, 0, 0))
        stream.observe(round_of(num, num, draft_cost, verify_cost), draft + verify)
    return plans


def test_where_to_prepare_slows_the_target_down_it_soon_ends() -> None:
    shared = SharedChoice(lambda: 1, num_outcomes=None)
    plans = plans_where_preparing_slows_the_target(shared)
    assert any(plan.num_outcomes for plan in plans)
    assert sum(plan.num_outcomes > 0 for plan in plans) < 40
    assert all(plan.num_draft_tokens and not plan.num_outcomes for plan in plans[-10:])


def test_where_draft_and_target_take_turns_nothing_is_prepared_until_they_do_not() -> None:
    takes_turns = True
    shared = SharedChoice(lambda: 1, num_outcomes=None, may_prepare=lambda: not takes_turns)
    plans = plans_where_preparing_slows_the_target(shared)
    assert all(plan.num_draft_tokens and not plan.num_outcomes for plan in plans)
    assert shared.num_outcomes == 0
    takes_turns = False
    assert any(plan.num_outcomes for plan in plans_where_preparing_slows_the_target(shared))


HERE = ModelInfo(name="x", vocab_size=64, context_len=64, host="here", num_cores=8, num_threads=4)


@pytest.mark.parametrize(
    ("draft", "takes_turns"),
    [
        ({}, True),
        ({"num_threads": 3}, False),
        ({"num_threads": 3, "num_cores": 7}, True),
        ({"host": "there"}, False),
        ({"devices": ("gpu 1",)}, False),
    ],
)
def test_who_takes_turns_with_whom(draft: dict[str, Any], takes_turns: bool) -> None:
    """By threads and cores of a host, one of which runs the coordinator; or by accelerators."""
    assert HERE.takes_turns_with(replace(HERE, **draft)) is takes_turns
    assert replace(HERE, **draft).takes_turns_with(HERE) is takes_turns
    cards = replace(HERE, devices=("gpu 1", "gpu 2"))
    assert cards.takes_turns_with(replace(HERE, **draft)) is ("devices" in draft)


def test_a_beginner_prepares_what_is_fixed_and_waits_no_longer_than_it_is_worth() -> None:
    stream = AdaptiveLength(SharedChoice(lambda: 1, num_outcomes=16))
    first = stream.plan()
    stream.observe(far_round(first, 2), 110_000_000)
    second = stream.plan()
    assert first.num_outcomes == second.num_outcomes == 16
    assert 0.16 < second.patience_s < 1.0


@pytest.mark.parametrize(
    ("tokens", "least", "last", "prepares", "expected"),
    [
        ([1.0, 1.5, 1.6], 0, 0, False, Length(1, 1, waits=True)),  # 1.00, 1.36, 1.33 times plain decoding
        ([1.0, 1.5, 1.63], 0, 2, False, Length(2, 2, waits=True)),  # hardly worse than the best: prepared for
        ([1.0, 1.0, 1.0], 0, 0, True, Length(0, 0, waits=False)),
        ([1.0, 1.0, 1.0], 1, 0, True, Length(1, 1, waits=False)),  # 0.91 times plain decoding
        ([1.0, 1.0, 1.1], 0, 0, True, Length(0, 2, waits=False)),
    ],
)
def test_a_length_follows_from_values(
    tokens: list[float], least: int, last: int, prepares: bool, expected: Length
) -> None:
    prospects = Prospects([], [1.0, 1.1, 1.2], [1.0, 1.01, 1.02], 1.0)
    assert choose(tokens, prospects, last, least=least, prepares=prepares) == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize("accident", [4.0, 30.0])
def test_after_an_accident_speculation_is_soon_tried_again(accident: float) -> None:
    machine = Machine(4, **CHEAP)
    machine.run(300, 0.6)
    machine.sharing = accident
    machine.run(300, 0.6)
    assert machine.chosen[0] > 0.7 * machine.chosen.total()
    machine.sharing = 1.0
    machine.run(200, 0.6)
    assert machine.run(500, 0.6) > 0.9 * machine.ideal(0.6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_trials_cost_little(seed: int) -> None:
    """Once much is known, and nothing changes."""
    machine = Machine(2, **CHEAP)
    machine.rng = np.random.default_rng(seed)
    machine.run(2000, 0.7)
    before = machine.shared.num_trials
    assert machine.run(1500, 0.7) > 0.93 * machine.ideal(0.7)
    assert machine.shared.num_trials - before <= 30


# --- what is believed of ways ----------------------------------------------------------------------


def believed(*seen: tuple[Way, float, float], num_streams: int = 1, now: float = 0.0) -> Any:
    """Means and deviations by way, where some took so many times their modelled time at some time."""
    deviations = Deviations()
    for way, ratio, at in seen:
        deviations.add(way, ratio, Moment(at, 1, 1.0))
    mean, covariance = deviations.of(WAYS, Moment(now, num_streams, 1.0))
    spread = np.sqrt(np.diag(covariance))
    return dict(zip(WAYS, np.exp(mean), strict=True)), dict(zip(WAYS, spread, strict=True))


CHAINS, PREPARED, TREE = Way(True), Way(True, CHAIN, True), Way(True, 16)


def test_ways_that_share_a_cause_are_believed_alike() -> None:
    slower, spread = believed((CHAINS, 3.0, 0.0))
    assert slower[CHAINS] == pytest.approx(3.0, rel=0.08)
    assert slower[CHAINS] > slower[TREE] > slower[PLAIN] > 1.3
    assert spread[CHAINS] < 0.11 < spread[TREE] < min(spread[PREPARED], spread[PLAIN])


def test_what_only_preparing_slows_is_not_held_against_drafts() -> None:
    slower, _ = believed((PREPARED, 3.0, 0.0), (CHAINS, 1.0, 0.0))
    assert slower[TREE] < 1.2
    assert slower[Way(True, 16, True)] > 1.8


def test_what_was_measured_long_ago_is_forgotten_and_an_accident_sooner() -> None:
    lasting = [(CHAINS, 1.0, float(at)) for at in range(0, 32, 8)]
    after = [believed(*lasting, (CHAINS, 3.0, 32.0), now=32.0 + later)[0][CHAINS] for later in (0, 4, 12)]
    assert after[0] > 2.5
    assert after[0] > after[1] > after[2]
    assert after[2] < 1.7
    assert believed((CHAINS, 3.0, 0.0), now=2_400.0)[0][CHAINS] < 1.05


def test_one_number_of_streams_says_less_of_another() -> None:
    found = [believed((CHAINS, 3.0, 0.0), num_streams=streams)[0][CHAINS] for streams in (1, 2, 16, 256)]
    assert found == sorted(found, reverse=True)
    assert found[1] > 2.0
    assert found[-1] < 1.7


def test_a_draft_that_is_away_tells_nothing_of_what_speculation_brings() -> None:
    shared = SharedChoice(lambda: 1, num_outcomes=16)
    stream = AdaptiveLength(shared)
    far_plans(stream, 40, 16)
    before = stream.plan().num_draft_tokens
    away = replace(far_round(Plan(0), 0), draft_cost=Cost(outcome=CallOutcome.UNAVAILABLE))
    for _ in range(3000):
        stream.plan()
        stream.observe(away, 30_000_000)
    assert stream.plan().num_draft_tokens == before > 0
    assert shared.num_trials == 0


DRAFTS = Load(draft_pass_ns=300_000, draft_hosted_ns=1_200_000)


@pytest.mark.parametrize(
    ("target", "draft"),
    [(DRAFTS, None), (Load(), replace(DRAFTS, base_ns=300_000))],
    ids=["a target that drafts", "a draft service"],
)
def test_where_only_the_host_grows_trees_they_cost_more_than_chains(target: Load, draft: Load | None) -> None:
    """As on a GPU, where a chain is decoded without the host."""
    target = replace(target, base_ns=8_000_000)
    shared = SharedChoice(lambda: 1, told=lambda: (target, draft))
    shared.begin_round(shared.among(has_trees=True))
    chain, tree = (shared.costs.round_ns(Way(True, num_nodes), 5) for num_nodes in (0, 16))
    assert chain == 8_000_000 + 5 * 300_000
    assert tree == chain + 5 * 1_200_000
    assert next(each.way.num_nodes for each in shared.expected() if each.way.drafts) == 0


@pytest.mark.parametrize(
    ("target", "draft"),
    [(Load(draft_pass_ns=300_000), None), (Load(), Load(base_ns=300_000))],
    ids=["a target that drafts", "a draft service"],
)
def test_what_the_target_measured_is_known_after_rounds_without_a_choice(
    target: Load, draft: Load | None
) -> None:
    """As of requests whose length is fixed; meanwhile passes look dearer than they were alone."""
    told = replace(target, base_ns=8_000_000)
    shared = SharedChoice(lambda: 1, told=lambda: (told, draft))
    slower = Cost(forward_ns=20_000_000, load=replace(told, base_ns=20_000_000))
    fixed = FixedLength(0, shared)
    fixed.plan()
    fixed.observe(round_of(0, 0, Cost(), slower), 20_000_000)
    AdaptiveLength(shared).plan()
    assert shared.costs.alone_ns(1) == 8_000_000
    assert shared.costs.pass_ns == 20_000_000


def test_rounds_before_the_first_draft_tokens_are_not_held_against_drafting() -> None:
    """The target had gone on by itself, and then its draft has run the prompt."""
    target = Load(base_ns=8_000_000, draft_pass_ns=300_000, draft_node_ns=10_000)
    shared = SharedChoice(lambda: 1, told=lambda: (target, None))
    stream = AdaptiveLength(shared)
    for _ in range(2):
        assert stream.plan().num_draft_tokens
        stream.observe(round_of(0, 0, Cost(), Cost(load=target)), 400_000_000)
    assert not any(each.measured_rate for each in shared.compared())


@pytest.mark.parametrize(
    ("draft_ns", "text_len", "drafts"),
    [(300_000, 10, (True, True)), (3_000_000, 10, (False, True)), (3_000_000, 1000, (False, False))],
    ids=["it promises much", "little", "little, and the draft has not run long texts"],
)
def test_costs_that_were_measured_alone_have_to_promise_much_at_first(
    draft_ns: int, text_len: int, drafts: tuple[bool, bool]
) -> None:
    """Else the first block is plain, after which drafting is tried where a trial is not too dear."""
    load = Load(base_ns=8_000_000, draft_pass_ns=draft_ns, draft_node_ns=20_000)
    streams = range(16)
    shared = SharedChoice(lambda: len(streams), told=lambda: (load, None))
    planners = [AdaptiveLength(shared) for _ in streams]
    found = []
    for _ in range(50):
        lengths = [planner.plan().num_draft_tokens for planner in planners]
        found.append(any(lengths))
        for planner, length in zip(planners, lengths, strict=True):
            proposal = Proposal(text_len, [0] * length)
            done = Round(proposal, Verdict(0, []), Outcome(range(length), 0), Cost(), Cost(load=load))
            planner.observe(done, 8_000_000 + length * draft_ns)
    assert (found[0], any(found)) == drafts


def test_where_the_target_drafts_for_all_together_no_stream_drafts_less_than_suits_all() -> None:
    """It would wait for the others all the same. Of half of the texts one draft token is accepted, of the
    others all are."""
    target = Load(base_ns=30_000_000, token_ns=100_000, draft_pass_ns=3_000_000, draft_node_ns=20_000)
    shared = SharedChoice(lambda: 8, told=lambda: (target, None))
    planners = [AdaptiveLength(shared) for _ in range(8)]
    lengths = [0] * 8
    for _ in range(100):
        lengths = [planner.plan().num_draft_tokens for planner in planners]
        elapsed_ns = int(target.pass_ns(8, 8 + sum(lengths)) + 3_000_000 * max(lengths))
        for i, (planner, length) in enumerate(zip(planners, lengths, strict=True)):
            outcome = Outcome(range(length if i % 2 else min(length, 1)), 0)
            done = Round(Proposal(10, [0] * length), Verdict(0, []), outcome, Cost(), Cost(load=target))
            planner.observe(done, elapsed_ns)
    assert min(lengths) > 8


@pytest.mark.parametrize(("text_len", "is_tried"), [(10, True), (20_000, False)])
def test_a_draft_that_takes_turns_with_the_target_runs_texts_first(text_len: int, is_tried: bool) -> None:
    """So a trial of it is as dear as texts are long, wherever it runs."""
    target, draft = Load(base_ns=8_000_000, token_ns=10_000), Load(base_ns=6_000_000, token_ns=100_000)
    shared = SharedChoice(
        lambda: 4, num_outcomes=None, may_prepare=lambda: False, told=lambda: (target, draft)
    )
    planners, found = [AdaptiveLength(shared) for _ in range(4)], []
    for _ in range(400):
        lengths = [planner.plan().num_draft_tokens for planner in planners]
        found.append(any(lengths))
        for planner, length in zip(planners, lengths, strict=True):
            wall_ns = 6_000_000 * length
            asked = Cost(CallOutcome.ASKED, wall_ns=wall_ns, forward_ns=wall_ns, num_prefill_tokens=1)
            proposal = Proposal(text_len, [0] * length)
            done = Round(proposal, Verdict(0, []), Outcome(range(0), 0), asked, Cost(load=target))
            planner.observe(done, 8_000_000 + wall_ns)
    assert any(found) is is_tried


def test_costs_are_learnt_and_old_ones_kept() -> None:
    model, rng = CostModel(2), np.random.default_rng(1)

    def cost(sequences: float, tokens: float) -> float:
        return (30 + 0.6 * sequences + 0.4 * tokens) * rng.lognormal(0, 0.1)

    model.add((1, 90), cost(1, 90))
    for _ in range(300):
        model.add((1, 1), cost(1, 1))
    assert model.predict((1, 5)) == pytest.approx(32.6, rel=0.1)
    for _ in range(400):
        sequences = int(rng.integers(1, 20))
        tokens = sequences * int(rng.integers(1, 6))
        model.add((sequences, tokens), cost(sequences, tokens))
    assert model.predict((16, 80)) == pytest.approx(71.6, rel=0.1)
    assert model.base == pytest.approx(30, rel=0.15)


def test_a_size_that_was_slow_once_and_is_avoided_since_is_forgotten() -> None:
    """Who plans by these costs runs no more of it, so nothing else would ever correct it."""
    costs = CostModel(1)
    for _ in range(10):
        costs.add((1,), 2.0)
    costs.add((32,), 60.0)
    assert costs.predict((32,)) > 50.0
    for _ in range(1000):
        costs.add((1,), 2.0)
    assert costs.predict((32,)) == pytest.approx(2.0, rel=1e-3)


def test_slow_trees_leave_chains_as_cheap_as_they_are() -> None:
    """The second feature says whether the host chose: see `Load.draft_hosted_ns`."""
    costs = CostModel(2)
    costs.assume([((1, 0), 1.0), ((8, 0), 1.2), ((4, 1), 2.0), ((32, 1), 3.0)])
    for _ in range(20):
        costs.add((3, 1), 6.0)
        costs.add((1, 0), 1.0)
    assert costs.predict((1, 0)) == pytest.approx(1.0, rel=0.2)
    assert costs.predict((3, 1)) == pytest.approx(6.0, rel=0.2)


def test_alike_observations_are_all_base() -> None:
    model = CostModel(2)
    for _ in range(50):
        model.add((16, 16), 40.0)
    assert model.base == pytest.approx(40.0)
    assert model.rates == (0.0, 0.0)
    model.add((16, 16), 4e6)
    assert model.base < 100, "one pause of the machine is no trend"
