"""Emitted text follows the target's distribution, measured through the three services over gRPC.

The target's distribution depends on the last token alone, so every emitted token is one draw from a known
one, and a long generation is a large sample. The draft is hostile: its logits are the target's negated.

With N_v the count of token v and E_v the sum of its probabilities over the same contexts, N - E is a sum
of martingale differences whose covariance is the sum of diag(p) - p pᵀ. Grouped by the token before,
(N - E)ᵀ C⁻ (N - E) is χ² distributed for large samples, whatever the history does to it. One test
function raises a false alarm with probability 1e-6 (FALSE_ALARM_RATE) if seeds were random; they are fixed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import coordinator.assembly
from coordinator.generation import Plan, Round
from coordinator.length.planners import AdaptiveLength
from specwire import Completion, Rule, SamplingParams
from specwire.rpc.wire import client as client_wire
from tests.support.harness import local_stack
from tests.support.markov_distribution import FEW, PROMPT, fit_p_value
from tests.support.pairs import save_markov_pair
from tests.support.raw_streams import Wire
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.together import sampled, together

NUM_TOKENS = 3_200
NUM_STREAMS = 64
RULES = (Rule.BLOCK, Rule.REJECTION, Rule.GUMBEL)

LONG = NUM_TOKENS // NUM_STREAMS
"""Tokens a generation where the distribution depends on the last token alone."""
ALONE = 625
"""The same with few others."""
SHORT = 25
"""Tokens a generation where it depends on which tokens came before: later, all have come."""

CASES = [
    pytest.param({"temperature": 0.8, "top_p": 0.9}, LONG, id="cold"),
    pytest.param({"temperature": 1.4, "min_p": 0.1}, LONG, id="hot", marks=pytest.mark.slow),
    pytest.param({"top_k": 5, "logit_bias": {2: 1.5, 7: -2.0}}, LONG, id="biased", marks=pytest.mark.slow),
    pytest.param(
        {"repetition_penalty": 1.6, "presence_penalty": 1.2, "frequency_penalty": 0.7}, SHORT, id="penalised"
    ),
]
"""Every sampling parameter, over the wire; `test_distributions.py` has each alone, with larger samples."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """In this process; `test_kseq.py` and `test_vocabularies.py` have three of their own."""
    pair = save_markov_pair(tmp_path_factory.mktemp("markov"), -1.0)
    options = {"num_draft_tokens": "2", "num_outcomes": "0"}
    with local_stack(*pair, coordinator_options=options) as stack:
        yield stack.address


def test_plain_rejection_sampling_and_a_wrong_distribution(address: str, logits: torch.Tensor) -> None:
    """The target's distribution fits, and a slightly different one does not: the tests below can fail."""
    params: dict[str, Any] = {"max_tokens": LONG, "rule": Rule.REJECTION}
    completions = sampled(address, SamplingParams(**params), range(NUM_STREAMS), PROMPT)
    assert fit_p_value(completions, logits, SamplingParams(**params)) > FALSE_ALARM_RATE
    wrong = SamplingParams(**params, temperature=1.35)  # 1.3 gives a p-value of 1e-11
    assert fit_p_value(completions, logits, wrong) < CLEARLY_WRONG


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 2},
    {"top_p": 0.8},
    {"min_p": 0.4},
    {"presence_penalty": 1.0, "frequency_penalty": 0.1, "repetition_penalty": 1.3},
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_three_successive_tokens_follow_the_target(address: str, logits: torch.Tensor, rule: Rule) -> None:
    """By their joint distribution, with every parameter; two or three different ones are possible."""
    given: dict[str, Any] = {"max_tokens": LONG, "rule": rule, "num_draft_tokens": 4, "logit_bias": FEW}
    params = [given | each for each in PARAMETERS]
    kinds = _sample_together(address, params, range(20))
    for settings, completions in zip(params, kinds, strict=True):
        p_value = fit_p_value(completions, logits, SamplingParams(**settings), num_before=2)
        assert p_value > FALSE_ALARM_RATE / len(params), settings


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("settings", "length"), CASES)
def test_every_rule_follows_the_target(
    address: str, logits: torch.Tensor, rule: Rule, settings: dict[str, Any], length: int
) -> None:
    check_distribution(address, logits, rule, settings, length)


def check_distribution(
    address: str, logits: torch.Tensor, rule: Rule, settings: dict[str, Any], length: int
) -> None:
    params = {"rule": rule, "max_tokens": length, **settings}
    completions = sampled(address, SamplingParams(**params), range(NUM_TOKENS // length), PROMPT)
    drafted = sum(done.speculation.num_draft_tokens for done in completions)
    accepted = sum(done.speculation.num_accepted_tokens for done in completions)
    assert drafted > NUM_TOKENS / 2
    assert accepted / drafted < 0.6, "the draft was meant to be hostile"
    p_value = fit_p_value(completions, logits, SamplingParams(**params))
    assert p_value > FALSE_ALARM_RATE


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", RULES)
def test_ends_are_excluded_until_min_tokens(address: str, logits: torch.Tensor, rule: Rule) -> None:
    """And only until then. A reference that excludes them one token longer does not fit."""
    ends: dict[str, Any] = {"stop_token_ids": (2, 7, 11), "logit_bias": {2: 1.0, 7: 1.0}}
    params: dict[str, Any] = {"rule": rule, "max_tokens": SHORT, "min_tokens": 5, **ends}
    completions = sampled(address, SamplingParams(**params), range(160), PROMPT)
    lengths = [len(done.token_ids) for done in completions]
    assert min(lengths) == 6
    assert sum(done.speculation.num_draft_tokens for done in completions) > 160
    assert fit_p_value(completions, logits, SamplingParams(**params)) > FALSE_ALARM_RATE
    longer = SamplingParams(**params | {"min_tokens": 6})
    assert fit_p_value(completions, logits, longer) < CLEARLY_WRONG


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "has_model", "num_draft_tokens", "settings"),
    [
        ("ngram", False, "3", CASES[0].values[0]),
        pytest.param("ngram", False, "auto", {}, marks=pytest.mark.slow),
        ("ngram", True, "2", CASES[0].values[0]),
        pytest.param("ngram", True, "auto", {"temperature": 1.4}, marks=pytest.mark.slow),
        ("suffix", False, "3", CASES[0].values[0]),
        pytest.param("bigram", False, "3", CASES[0].values[0], marks=pytest.mark.slow),
    ],
)
def test_a_draft_from_text(
    tmp_path: Path,
    logits: torch.Tensor,
    method: str,
    has_model: bool,
    num_draft_tokens: str,
    settings: dict[str, Any],
) -> None:
    """Supports of one token, alone and in turns with those of a model.

    `suffix` and `bigram` draft from outputs of earlier requests too: the second sample has the first to draft
    from. That none of its random numbers were used before is tested in `test_text_drafts.py`.
    """
    target, draft = save_markov_pair(tmp_path, 0.7, 3)
    options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "suffix_shared": True}
    options["speculative_config"] = json.dumps({"method": method})
    with local_stack(target, draft if has_model else None, coordinator_options=options) as stack:
        params: dict[str, Any] = {"rule": Rule.REJECTION, "max_tokens": LONG, **settings}
        for _ in range(1 if method == "ngram" else 2):
            completions = sampled(stack.address, SamplingParams(**params), range(NUM_STREAMS), PROMPT)
    by_source = [counts for done in completions for counts in done.speculation.by_source]
    if num_draft_tokens != "auto":  # which may find that the model does not pay, on a busy machine
        assert len({counts.source for counts in by_source}) == 1 + has_model
    drafted = sum(counts.num_draft_tokens for counts in by_source if counts.source == method)
    accepted = sum(counts.num_accepted_tokens for counts in by_source if counts.source == method)
    assert 0.02 * drafted < accepted < 0.9 * drafted
    assert drafted > NUM_TOKENS / 20
    assert fit_p_value(completions, logits, SamplingParams(**params)) > FALSE_ALARM_RATE


MIXED: list[dict[str, Any]] = [
    {"rule": Rule.REJECTION},
    {"rule": Rule.REJECTION, "temperature": 0.5},
    {"rule": Rule.REJECTION, "temperature": 1.6, "top_k": 6},
    {"rule": Rule.BLOCK, "temperature": 1.2},
    {"rule": Rule.KSEQ, "temperature": 1.1},
    {"rule": Rule.GUMBEL, "temperature": 0.7},
    {"rule": Rule.GUMBEL, "top_p": 0.9},
    {"rule": Rule.GUMBEL, "temperature": 0},
]


@pytest.mark.slow
def test_requests_of_all_kinds_in_one_step(address: str, logits: torch.Tensor) -> None:
    """Each has its own rule, temperature, seed and place among the rows, whatever is beside it.

    Seed 0 is left out: under `kseq` its last number is 1.1e-8 from the end of a token's interval, and passes
    of another size round to either side of it.
    """
    params = [{"max_tokens": LONG, **each} for each in MIXED]
    kinds = _sample_together(address, params, range(1, 25))
    for number, (settings, completions) in enumerate(zip(MIXED, kinds, strict=True)):
        [alone] = _sample_together(address, [params[number]], range(1, 3))
        assert [done.token_ids for done in alone] == [done.token_ids for done in completions[:2]]
        if settings.get("temperature") == 0:
            tokens = [*PROMPT, *completions[0].token_ids]
            assert list(completions[0].token_ids) == logits[tokens[:-1]].argmax(dim=-1).tolist()
            assert len({done.token_ids for done in completions}) == 1
        else:
            p_value = fit_p_value(completions, logits, SamplingParams(**params[number]))
            assert p_value > FALSE_ALARM_RATE / len(MIXED), settings


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_resuming_does_not_change_the_distribution(address: str, logits: torch.Tensor, rule: Rule) -> None:
    """Each generation is cut four times, and one coordinator after another goes on with it."""
    params = [SamplingParams(max_tokens=100, rule=rule, seed=i, num_draft_tokens=2) for i in range(24)]

    async def sample() -> list[Completion]:
        requests = [client_wire.generate_request(None, each, PROMPT) for each in params]
        async with Wire(address) as wires:
            return await asyncio.gather(*(wires.generate(request, 1, 7, 2, 12) for request in requests))

    completions = asyncio.run(sample())
    assert [len(done.token_ids) for done in completions] == [100] * len(params)
    assert fit_p_value(completions, logits, SamplingParams(max_tokens=100)) > FALSE_ALARM_RATE


class Restless(AdaptiveLength):
    """Takes its length from how the last round went, as greedily as the past allows."""

    last = 0

    def plan(self) -> Plan:
        return Plan((1, 3, 0, 5, 2)[self.last], num_outcomes=8)

    def observe(self, done: Round, elapsed_ns: int) -> None:
        super().observe(done, elapsed_ns)
        self.last = (len(done.proposal.token_ids) + 2 * done.outcome.num_accepted) % 5


@pytest.mark.slow
def test_a_length_chosen_by_what_happened_does_not_change_the_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor
) -> None:
    monkeypatch.setattr(coordinator.assembly, "AdaptiveLength", Restless)
    pair = save_markov_pair(tmp_path, -1.0)
    with local_stack(*pair, coordinator_options={"num_draft_tokens": "auto"}) as stack:
        params: dict[str, Any] = {"max_tokens": ALONE, "rule": Rule.REJECTION}
        completions = sampled(stack.address, SamplingParams(**params), range(4), PROMPT)
    lengths = {len(done.speculation.drafted_per_position) for done in completions}
    assert max(lengths) == 5
    assert fit_p_value(completions, logits, SamplingParams(**params)) > FALSE_ALARM_RATE


def _sample_together(address: str, kinds: list[dict[str, Any]], seeds: range) -> list[list[Completion]]:
    """Generations of several kinds, each with these seeds, all at once."""

    requests = [(SamplingParams(**params, seed=seed), PROMPT) for params in kinds for seed in seeds]
    found = together(address, requests)
    return [found[start : start + len(seeds)] for start in range(0, len(found), len(seeds))]
