"""Drafts from the text itself: what is found, how much of it is proposed, and what a look-up costs."""

from __future__ import annotations

import asyncio
import random
import timeit
from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.cost import Cost
from coordinator.drafts.combined import CombinedDrafter
from coordinator.drafts.ngram import History, NgramDrafter
from coordinator.drafts.rates import Rate, expected_tokens
from coordinator.generation import Plan, Round
from coordinator.length.draft_length import FixedLength, WithText
from coordinator.length.measurements import SharedMeasurements
from coordinator.peers.checks import check_proposal
from specwire.config.speculative import NgramConfig
from specwire.core import Load, Outcome, Proposal, Verdict
from specwire.telemetry.tracing import NO_SPAN, Span

CONFIG = NgramConfig(prompt_lookup_min=2, prompt_lookup_max=4)
PLAN = Plan(0, num_text_tokens=4)


def drafter(*, is_fixed: bool = False, matches_tokens: bool = True) -> NgramDrafter:
    return NgramDrafter(CONFIG, matches_tokens=matches_tokens, is_fixed=is_fixed)


def proposed(drafter: NgramDrafter, committed: list[int], plan: Plan = PLAN) -> list[int]:
    proposal, cost = asyncio.run(drafter.propose(committed, plan, NO_SPAN))
    assert cost == Cost()
    assert proposal.base_len == len(committed)
    return list(proposal.token_ids)


def round_of(proposal: Proposal, num_accepted: int, next_token: int, *, load: Load | None = None) -> Round:
    verdict = Verdict(proposal.base_len, ())
    return Round(proposal, verdict, Outcome(range(num_accepted), next_token), Cost(), Cost(load=load))


class TestWhatIsFound:
    def test_the_longest_match_wins_over_a_later_one(self) -> None:
        text = [1, 2, 3, 10, 11, 12, 13, 2, 3, 20, 21, 22, 23, 1, 2, 3]
        assert proposed(drafter(), text) == [10, 11, 12, 13]

    def test_the_latest_of_equal_matches_wins(self) -> None:
        text = [9, 2, 3, 10, 11, 8, 2, 3, 20, 21, 22, 7, 2, 3]
        assert proposed(drafter(), text) == [20, 21, 22, 7]

    def test_a_match_may_begin_the_sequence(self) -> None:
        assert proposed(drafter(), [2, 3, 10, 11, 12, 2, 3]) == [10, 11, 12, 2]

    @pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4], [5, 1, 2, 3, 6, 1]])
    def test_nothing_shorter_than_the_least_length(self, text: list[int]) -> None:
        assert proposed(drafter(), text) == []

    def test_one_token_where_the_least_length_is_one(self) -> None:
        config = NgramConfig(prompt_lookup_min=1)
        one = NgramDrafter(config, matches_tokens=True, is_fixed=True)
        assert proposed(one, [5, 1, 2, 3, 6, 1]) == [2, 3, 6, 1]

    def test_a_repetition_goes_on(self) -> None:
        assert proposed(drafter(), [9, 1, 2, 1, 2]) == [1, 2, 1, 2]
        assert proposed(drafter(), [7, 7, 7, 7]) == [7, 7, 7, 7]

    def test_as_by_a_plain_search_while_the_text_grows(self) -> None:
        """Against a search over all n-grams, through growth, with few and with many different tokens."""
        for vocab_size in (3, 12):
            numbers = random.Random(vocab_size)
            text = [numbers.randrange(vocab_size) for _ in range(700)]
            history = History(CONFIG.prompt_lookup_min, CONFIG.prompt_lookup_max)
            for end in range(1, len(text), 3):
                history.update(text[:end])
                match = history.find()
                assert (match.end if match else None) == plain_search(text[:end])


def plain_search(text: list[int]) -> int | None:
    for n in range(CONFIG.prompt_lookup_max, CONFIG.prompt_lookup_min - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return end
    return None


class TestHowMuch:
    TEXT = (2, 3, 4, 5, 6, 7, 2, 3)

    def test_no_more_than_planned(self) -> None:
        assert proposed(drafter(), list(self.TEXT), Plan(9, num_text_tokens=2)) == [4, 5]
        assert proposed(drafter(is_fixed=True), list(self.TEXT), Plan(9)) == []

    def test_matches_that_mislead_are_not_proposed_where_tokens_cost_time(self) -> None:
        """They are still compared with what is committed, and proposed again when they turn out right."""
        load = Load(base_ns=1_000_000, sequence_ns=0, token_ns=300_000)
        ngram, fixed = drafter(), drafter(is_fixed=True)
        text = list(self.TEXT)
        for _ in range(8):
            for each in (ngram, fixed):
                done = round_of(Proposal(len(text), proposed(each, text)), 0, 99, load=load)
                each.observe(done)
        assert proposed(ngram, text) == []
        assert proposed(fixed, text) == [4, 5, 6, 7], "the request fixed the number"
        for _ in range(8):
            ngram.observe(round_of(Proposal(len(text), proposed(ngram, text)), 0, 4, load=load))
        assert proposed(ngram, text)[:1] == [4]

    def test_the_last_round_of_a_generation(self) -> None:
        plan = Plan(5, num_outcomes=8, patience_s=1.0, num_text_tokens=9)
        assert plan.within(9, 9) is plan
        assert plan.within(3, 9) == Plan(3, patience_s=1.0, num_text_tokens=3)

    def test_expected_tokens(self) -> None:
        assert expected_tokens(0.5, 3) == [1, 1.5, 1.75, 1.875]
        rate = Rate(0.5)
        for _ in range(50):
            rate.add(3, was_rejected=True)
        assert rate.value == pytest.approx(0.75, abs=0.02)


def test_supports_of_one_token_pass_the_checks_of_any_proposal() -> None:
    proposal, _ = asyncio.run(drafter(matches_tokens=False).propose([*TestHowMuch.TEXT], PLAN, NO_SPAN))
    assert [(s.token_ids.tolist(), s.probs.tolist()) for s in proposal.supports] == [
        ([token_id], [1.0]) for token_id in proposal.token_ids
    ]
    check_proposal(proposal, 8, matches_tokens=False)


class FakeModel:
    """A draft model that proposes two wrong tokens, while it is there."""

    unavailable = ""
    num_asked = 0
    is_there = True

    async def propose(self, committed: Sequence[int], plan: Plan, parent: Span) -> tuple[Proposal, Cost]:
        self.num_asked += 1
        return Proposal(len(committed), [98, 97] if self.is_there else [], source="small"), Cost()

    def observe(self, done: Round) -> None: ...

    def close(self) -> None: ...


class TestBesideAModel:
    PLAN = Plan(2, num_text_tokens=4)

    def rounds(self, model: FakeModel, text: list[int], emitted: int, number: int) -> list[str]:
        """Sources of so many rounds in the same place, each of which rejects everything."""
        combined, sources = CombinedDrafter(drafter(), model), []
        for _ in range(number):
            proposal, _ = asyncio.run(combined.propose(text, self.PLAN, NO_SPAN))
            combined.observe(round_of(proposal, 0, emitted))
            sources.append(proposal.source)
        return sources

    def test_the_model_proposes_where_the_text_does_not(self) -> None:
        assert set(self.rounds(FakeModel(), [1, 2, 3, 4], 99, 3)) == {"small"}

    def test_whichever_promises_more(self) -> None:
        """The text's match is long, and turns out to mislead; the model is not asked before."""
        sources = self.rounds(model := FakeModel(), [*range(10, 30), *range(10, 26)], 99, 12)
        assert sources[0] == "ngram"
        assert "small" in sources
        assert model.num_asked == sources.count("small")

    def test_a_match_stands_in_for_a_model_that_is_not_there(self) -> None:
        model = FakeModel()
        model.is_there = False
        text = [2, 3, 4, 5, 6, 7, 2, 3]
        assert set(self.rounds(model, text, 4, 3)) == {"ngram"}

    def test_what_the_text_accepts_teaches_nothing_about_the_model(self) -> None:
        measured = SharedMeasurements(lambda: 1)
        planner = WithText(FixedLength(2, measured), num_text_tokens=8)
        assert planner.limit == 8
        assert planner.plan() == Plan(2, num_text_tokens=8)
        proposal = Proposal(4, [1, 2, 3], source="ngram")
        planner.observe(round_of(proposal, 3, 4), 1)
        assert measured.costs.mean_drafted == 0
        planner.observe(round_of(replace(proposal, source="small"), 3, 4), 1)
        assert measured.costs.mean_drafted > 0


@pytest.mark.parametrize("vocab_size", [1, 50, 5000])
def test_a_round_at_32k_tokens_takes_microseconds(vocab_size: int) -> None:
    """The bound is many times what a quiet machine needs (see docs/drafts.md), and far below any pass."""
    numbers = random.Random(1)
    text = [numbers.randrange(vocab_size) for _ in range(32_768)]
    ngram = drafter(is_fixed=True)
    proposed(ngram, text)
    least_s = min(timeit.repeat(lambda: ngram.guess(text, 8), number=20, repeat=20)) / 20
    assert least_s < 1e-3
