"""A draft that learns while it serves: the target's distribution and its text, while the weights change.

Over real services. Distributions are tested as in `test_wire_distributions.py`; the draft begins far from the
target, and comes near it within the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from draft_service import lessons
from draft_service.drafter import DraftDecider, Question
from specwire import Client, Completion, Rule, SamplingParams
from specwire.core import Learning
from specwire.engine.jobs import Job
from specwire.rule.columns import Places
from tests.support.harness import float32_processes, local_stack
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.pairs import markov_logits, markov_model, save_markov_pair
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.together import sampled

NUM_STREAMS, LENGTH = 32, 50
NUM_VERSIONS = 1
"""More may not follow: a draft that has learnt all there is gets no better."""
NUM_TURNS = 3
TIMEOUT_S = 240.0
RATE = 0.01
OTHER = (1.0, 1)
"""Of a draft that likes other tokens than its target."""
SETTINGS: list[dict[str, Any]] = [
    {"rule": Rule.BLOCK},
    {"rule": Rule.REJECTION, "temperature": 0.7, "top_p": 0.95},
    {"rule": Rule.GUMBEL},
]


@contextmanager
def learning_stack(directory: Path) -> Iterator[str]:
    """Processes as of `specwire up --draft-learn`."""
    target, draft = save_markov_pair(directory, *OTHER)
    settings = {"num_draft_tokens": "3", "num_outcomes": "4", "draft_learn": True, "draft_learn_share": 1.0}
    with float32_processes(target, draft, {"SPECWIRE_LEARN_RATE": str(RATE)}, **settings) as address:
        yield address


def progress(address: str) -> Learning:
    with Client(address) as client:
        _, draft = client.get_model_info()
    assert draft is not None
    assert draft.learning is not None
    return draft.learning


def until(address: str, is_there: Callable[[Learning], bool]) -> Learning:
    """What it has come to once it has come so far."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_there(found := progress(address)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def sample(address: str, settings: dict[str, Any], first_seed: int) -> list[Completion]:
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **settings)
    return sampled(address, params, range(first_seed, first_seed + NUM_STREAMS), PROMPT)


def acceptance(completions: Sequence[Completion]) -> float:
    drafted = sum(each.speculation.num_draft_tokens for each in completions)
    return sum(each.speculation.num_accepted_tokens for each in completions) / drafted


def sampled_while_it_learns(
    address: str, settings: Sequence[dict[str, Any]]
) -> tuple[list[list[Completion]], list[float]]:
    """Completions by settings, and the acceptance of each turn, until the weights were replaced often enough.

    Seeds are given twice: the coordinator draws others, since a draft that has learnt from an output knows
    the numbers that decided about it.
    """
    found: list[list[Completion]] = [[] for _ in settings]
    rates: list[float] = []
    versions: list[int] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(rates) < NUM_TURNS or versions[-2] < NUM_VERSIONS:  # at the start of the last turn
        assert time.monotonic() < deadline, versions
        turn = [sample(address, each, 0) for each in settings]
        for completions, new in zip(found, turn, strict=True):
            completions.extend(new)
        rates.append(acceptance([done for each in turn for done in each]))
        versions.append(progress(address).num_versions)
    return found, rates


@pytest.mark.slow
def test_the_distribution_is_the_targets_while_weights_change(tmp_path: Path, logits: Tensor) -> None:
    """Of every rule, and acceptance rises."""
    with learning_stack(tmp_path) as address:
        found, rates = sampled_while_it_learns(address, SETTINGS)
        now = until(address, lambda now: now.num_versions >= NUM_VERSIONS)
    for settings, completions in zip(SETTINGS, found, strict=True):
        if settings["rule"] is Rule.GUMBEL:
            completions = completions[:NUM_STREAMS]  # noqa: PLW2901 - the same texts again
        params = SamplingParams(**settings)
        assert fit_p_value(completions, logits, params) > FALSE_ALARM_RATE / len(SETTINGS), settings
        assert not any(done.speculation.draft_unavailable for done in completions)
    assert rates[-1] > rates[0] + 0.1
    assert now.agreement > now.first_agreement + 0.05
    assert now.num_steps > 0
    assert now.num_judged_tokens >= NUM_VERSIONS * lessons.MIN_TESTED


@pytest.mark.slow
def test_control_supports_of_other_weights_are_caught(
    tmp_path: Path, logits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is computed from the weights before, as if they changed between draw and support."""
    before = markov_logits(markov_model(*OTHER))
    last_tokens: list[int] = []
    ask, draw = DraftDecider.ask, DraftDecider._draw

    def noted(self: DraftDecider, jobs: Sequence[Job]) -> Question:
        last_tokens[:] = [job.sequence.tokens[-1] for job in jobs]
        return ask(self, jobs)

    def swapped(self: DraftDecider, question: Question, log_probs: Tensor, places: Places | None) -> Any:
        token_ids, *_ = draw(self, question, log_probs, places)
        _, *supports = draw(self, question, before[last_tokens].log_softmax(dim=-1), places)
        return [token_ids, *supports]

    monkeypatch.setattr(DraftDecider, "ask", noted)
    monkeypatch.setattr(DraftDecider, "_draw", swapped)
    options = {"learn": True, "learn_rate": RATE, "learn_share": 1.0, "support_mass": 1.0}
    with local_stack(*save_markov_pair(tmp_path, *OTHER), draft_options=options) as stack:
        settings = {"rule": Rule.REJECTION}
        sampled_while_it_learns(stack.address, [settings])
        later = [done for _ in range(2) for done in sample(stack.address, settings, 0)]
    assert fit_p_value(later, logits, SamplingParams(rule=Rule.REJECTION)) < CLEARLY_WRONG


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "gumbel"])
def test_the_text_is_that_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
    """Before, while and after the weights change."""
    options = {"learn": True, "learn_rate": RATE, "learn_share": 1.0}
    params = SamplingParams(
        max_tokens=200, ignore_eos=True, temperature=temperature, rule=Rule.GUMBEL, seed=5
    )
    with local_stack(*save_markov_pair(tmp_path, *OTHER), draft_options=options) as stack:
        plain = stack.client.generate(params=replace(params, num_draft_tokens=0), prompt_token_ids=PROMPT)
        accepted = []
        deadline = time.monotonic() + TIMEOUT_S
        while not progress(stack.address).num_versions:
            assert time.monotonic() < deadline
            done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
            assert done.token_ids == plain.token_ids
            accepted.append(done.speculation.num_accepted_tokens)
        done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
        assert done.token_ids == plain.token_ids
        assert done.speculation.num_accepted_tokens > accepted[0]
        stack.assert_idle_within(5.0)
