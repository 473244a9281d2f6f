"""Drafts from text: what is found, how much is proposed, what is remembered, and what a look-up costs."""

from __future__ import annotations

import asyncio
import random
import timeit
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.cost import Cost
from coordinator.drafts.counts import CountedOutput, Table
from coordinator.drafts.methods import (
    MAX_BYTES,
    MAX_SCOPES,
    MAX_TOKENS,
    EarlierOutputs,
    Occurrences,
    TextDrafts,
)
from coordinator.drafts.text import Method, TextDrafter
from coordinator.generation import Plan, Round
from coordinator.length.choice import SharedChoice
from coordinator.length.planners import FixedLength, WithText
from specwire.config.speculative import COUNTS, METHODS, SpeculativeConfig
from specwire.core import Load, Outcome, Proposal, Verdict
from specwire.embedded import TARGET_DIR
from specwire.errors import ConfigError
from specwire.proposals.estimate.rates import Rate, expected_tokens
from specwire.proposals.history import NO_TOKENS, History, TokenArray, likeliest_path
from specwire.telemetry.tracing import NO_SPAN, Span
from specwire.text.tokenizer import load

CONFIG = SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=4)
SUFFIX_CONFIG = SpeculativeConfig(method="suffix", prompt_lookup_min=2, prompt_lookup_max=4)
PLAN = Plan(0, num_text_tokens=4)
TEXT = [2, 3, 4, 5, 6, 7, 2, 3]


class FakeModel:
    """A draft model that proposes two wrong tokens, while it is there."""

    unavailable = ""
    num_asked = 0
    is_there = True

    async def propose(self, committed: Sequence[int], plan: Plan, parent: Span) -> tuple[Proposal, Cost]:
        self.num_asked += plan.num_draft_tokens > 0
        is_there = self.is_there and plan.num_draft_tokens
        return Proposal(len(committed), [98, 97] if is_there else [], source="small"), Cost()

    def observe(self, done: Round) -> None: ...

    def follow(self, committed: Sequence[int], begun: Proposal, plan: Plan) -> Cost:
        return Cost()

    def close(self) -> None: ...


def drafter(
    method: Method | None = None,
    model: FakeModel | None = None,
    *,
    is_fixed: bool = False,
    outputs: list[Sequence[int]] | None = None,
) -> TextDrafter:
    return TextDrafter(
        method=method or Occurrences(CONFIG),
        model=model or FakeModel(),
        source="ngram",
        matches_tokens=True,
        is_fixed=is_fixed,
        remember=(outputs if outputs is not None else []).append,
    )


def array(*token_ids: int) -> TokenArray:
    return np.array(token_ids, dtype=np.int32)


def proposed(drafter: TextDrafter, committed: list[int], plan: Plan = PLAN) -> list[int]:
    proposal, cost = asyncio.run(drafter.propose(committed, plan, NO_SPAN))
    assert cost == Cost()
    assert proposal.base_len == len(committed)
    return list(proposal.token_ids)


def round_of(proposal: Proposal, num_accepted: int, next_token: int, *, load: Load | None = None) -> Round:
    verdict = Verdict(proposal.base_len, ())
    return Round(proposal, verdict, Outcome(range(num_accepted), next_token), Cost(), Cost(load=load))


class TestWhatIsFound:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ([1, 2, 3, 10, 11, 12, 13, 2, 3, 20, 21, 22, 23, 1, 2, 3], [10, 11, 12, 13]),
            ([9, 1, 2, 1, 2], [1, 2, 1, 2]),
            ([7, 7, 7, 7], [7, 7, 7, 7]),
        ],
        ids=("the longest, not a later one", "a pair", "a token"),
    )
    def test_what_follows_a_match(self, text: list[int], found: list[int]) -> None:
        assert proposed(drafter(), text) == found

    @pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4], [5, 1, 2, 3, 6, 1]])
    def test_nothing_shorter_than_the_least_length(self, text: list[int]) -> None:
        assert proposed(drafter(), text) == []

    def test_one_token_where_the_least_length_is_one(self) -> None:
        one = drafter(Occurrences(SpeculativeConfig(prompt_lookup_min=1)), is_fixed=True)
        assert proposed(one, [5, 1, 2, 3, 6, 1]) == [2, 3, 6, 1]

    def test_as_by_a_plain_search_while_the_text_grows(self) -> None:
        """Against a search over all n-grams, through growth, with few and with many different tokens."""
        for vocab_size in (3, 12):
            numbers = random.Random(vocab_size)
            text = [numbers.randrange(vocab_size) for _ in range(700)]
            history = History(CONFIG.prompt_lookup_min, CONFIG.prompt_lookup_max)
            for end in range(1, len(text), 3):
                history.update(text[:end])
                found = history.find()
                assert (found[0][-1] if found else None) == plain_search(text[:end])


def plain_search(text: list[int]) -> int | None:
    for n in range(CONFIG.prompt_lookup_max, CONFIG.prompt_lookup_min - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return end
    return None


class TestHowMuch:
    def test_no_more_than_planned(self) -> None:
        assert proposed(drafter(), TEXT, Plan(0, num_text_tokens=2)) == [4, 5]
        assert proposed(drafter(is_fixed=True), TEXT, Plan(0)) == []

    def test_matches_that_mislead_are_not_proposed_where_tokens_cost_time(self) -> None:
        """They are still compared with what is committed, and proposed again when they turn out right."""
        load = Load(base_ns=1_000_000, sequence_ns=0, token_ns=300_000)
        ngram, fixed = drafter(), drafter(is_fixed=True)
        for _ in range(8):
            for each in (ngram, fixed):
                each.observe(round_of(Proposal(len(TEXT), proposed(each, TEXT)), 0, 99, load=load))
        assert proposed(ngram, TEXT) == []
        assert proposed(fixed, TEXT) == [4, 5, 6, 7], "the request fixed the number"
        for _ in range(8):
            ngram.observe(round_of(Proposal(len(TEXT), proposed(ngram, TEXT)), 0, 4, load=load))
        assert proposed(ngram, TEXT)[:1] == [4]

    def test_the_last_round_of_a_generation(self) -> None:
        plan = Plan(5, num_outcomes=8, patience_s=1.0, num_text_tokens=9)
        assert plan.within(9, 9) is plan
        assert plan.within(3, 9) == Plan(3, patience_s=1.0, num_text_tokens=3)

    def test_expected_tokens(self) -> None:
        assert expected_tokens([0.5] * 3) == [1, 1.5, 1.75, 1.875]
        rate = Rate(0.5)
        for _ in range(50):
            rate.add(3, num_promised=4)
        assert rate.value == pytest.approx(0.75, abs=0.02)


class TestBesideAModel:
    PLAN = Plan(2, num_text_tokens=4)

    def rounds(self, model: FakeModel, text: list[int], emitted: int, number: int) -> list[str]:
        """Sources of so many rounds in the same place, each of which rejects everything."""
        combined, sources = drafter(model=model), []
        for _ in range(number):
            proposal, _ = asyncio.run(combined.propose(text, self.PLAN, NO_SPAN))
            combined.observe(round_of(proposal, 0, emitted))
            sources.append(proposal.source)
        return sources

    def test_whichever_promises_more(self) -> None:
        """The text's match is long, and turns out to mislead; the model is not asked before."""
        sources = self.rounds(model := FakeModel(), [*range(10, 30), *range(10, 26)], 99, 12)
        assert sources[0] == "ngram"
        assert "small" in sources
        assert model.num_asked == sources.count("small")

    def test_a_match_stands_in_for_a_model_that_is_not_there(self) -> None:
        model = FakeModel()
        model.is_there = False
        assert set(self.rounds(model, TEXT, 4, 3)) == {"ngram"}

    def test_what_the_text_accepts_teaches_nothing_about_the_model(self) -> None:
        measured = SharedChoice(lambda: 1)
        planner = WithText(FixedLength(2, measured), num_text_tokens=8)
        assert planner.limit == 8
        assert planner.plan() == Plan(2, num_text_tokens=8)
        proposal = Proposal(4, [1, 2, 3], source="ngram")
        planner.observe(round_of(proposal, 3, 4), 1)
        assert measured.costs.mean_drafted == 0
        planner.observe(round_of(replace(proposal, source="small"), 3, 4), 1)
        assert measured.costs.mean_drafted > 0


class TestSuffix:
    def test_what_most_occurrences_share(self) -> None:
        """Three of four go on with 5, and of these two with 6; of the last two the latest wins."""
        rows = np.array([[5, 6, 1], [5, 7, 2], [9, 9, 9], [5, 6, 3]], dtype=np.int32)
        assert likeliest_path(rows) == ([5, 6, 3], [0.75, 2 / 3, 0.5])

    def test_it_outvotes_the_latest_occurrence(self) -> None:
        text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 8, 1, 2]
        assert proposed(drafter(Occurrences(SUFFIX_CONFIG, NO_TOKENS)), text)[:1] == [5]
        assert proposed(drafter(), text)[:1] == [8]

    def test_an_uncertain_path_ends_where_it_does_not_pay(self) -> None:
        """Half of the occurrences go on otherwise after the first token; a long proposal would cost time."""
        load = Load(base_ns=1_000_000, sequence_ns=0, token_ns=200_000)
        text = [1, 2, 3, 5, 5, 5, 1, 2, 3, 6, 6, 6, 1, 2]
        one = drafter(Occurrences(SUFFIX_CONFIG, NO_TOKENS))
        one.observe(round_of(Proposal(len(text)), 0, 99, load=load))
        assert proposed(one, text) == [3]


class TestCounts:
    @pytest.mark.parametrize(("n", "expected"), [(1, [2, 2, 2, 2]), (2, [3, 2, 3, 2]), (3, [3, 2, 5])])
    def test_the_most_frequent_continuation(self, n: int, expected: list[int]) -> None:
        """A path ends where the context is unknown."""
        found = Table(n, array(1, 2, 3, 2, 4, 1, 2, 3, 2, 5)).guess([9, 1, 2], 4)
        assert found is not None
        assert found.token_ids == expected
        assert all(0 < share <= 1 for share in found.shares)

    def test_an_empty_text(self) -> None:
        assert Table(2, NO_TOKENS).guess([1, 2], 4) is None

    def test_output_is_counted_as_it_grows(self) -> None:
        prompt, one = [1, 2, 3], CountedOutput(2, NO_TOKENS)
        assert one.guess(prompt, 4) is None, "prompts are not counted"
        guess = one.guess(prompt + [4, 5] * 8, 3)
        assert guess is not None
        assert guess.token_ids == [4, 5, 4]
        after = CountedOutput(2, array(3, 8)).guess(prompt, 1)
        assert after is not None
        assert after.token_ids == [8]


class TestCorpus:
    CONFIG = SpeculativeConfig(method="bigram", corpus=__file__)

    def test_it_is_text_for_a_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"corpus=.*the target has no tokenizer"):
            TextDrafts(self.CONFIG, None)
        (path := tmp_path / "x").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"corpus=.*can't decode"):
            TextDrafts(replace(self.CONFIG, corpus=str(path)), load(TARGET_DIR))


class TestEarlierOutputs:
    def test_memory_is_bounded_and_the_oldest_goes(self) -> None:
        outputs = EarlierOutputs()
        for scope in range(MAX_SCOPES + 2):
            outputs.add(str(scope), range(MAX_TOKENS + 5))
            outputs.of("0")  # stays in use
        assert outputs.num_bytes == MAX_BYTES
        assert outputs.of("0").tolist() == list(range(5, MAX_TOKENS + 5))
        assert not len(outputs.of("1"))

    def test_a_drafter_hands_in_its_output_once(self) -> None:
        """Closed in a pause and at its end; the tokens of the last round are among them."""
        outputs: list[Sequence[int]] = []
        one, text = drafter(outputs=outputs), [1, 2, 3]
        one.close()
        proposed(one, text)
        text += [4, 5]
        one.close()
        proposed(one, text)
        text.append(6)
        one.close()
        assert outputs == [(), [4, 5], [6]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab_size", [1, 50, 5000])
def test_a_round_at_32k_tokens_takes_microseconds(method: str, vocab_size: int) -> None:
    """The bound is many times what a quiet machine needs (see docs/drafts.md), and far below any pass."""
    numbers = np.random.default_rng(1)
    earlier, text = (numbers.integers(vocab_size, size=n, dtype=np.int32) for n in (MAX_TOKENS, 32_768))
    made: dict[str, Method] = {"ngram": Occurrences(CONFIG), "suffix": Occurrences(SUFFIX_CONFIG, earlier)}
    one = made.get(method) or CountedOutput(COUNTS[method], earlier)
    committed = text.tolist()
    one.guess(committed, 8)
    least_s = min(timeit.repeat(lambda: one.guess(committed, 8), number=20, repeat=20)) / 20
    assert least_s < 1e-3
