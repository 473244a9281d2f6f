"""Outputs under a grammar follow the masked target's distribution, over the wire.

What the grammar allows is found here by another library than that which makes the masks. See
`test_wire_distributions.py` for the statistic and its false-alarm rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specwire import (
    Completion,
    FinishReason,
    Grammar,
    InvalidRequestError,
    Rule,
    SamplingParams,
)
from specwire.config.speculative import GRAMMAR as GRAMMAR_SOURCE
from specwire.engine.grammars.matcher import GrammarMatcher
from specwire.rule.columns import Bits
from tests.support import together
from tests.support.harness import LocalStack, local_stack
from tests.support.languages import END_ID, FORCED, REGEX, TEXTS, allowed, save_speakers
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE

NUM_TEXTS = 60
GRAMMAR = Grammar(regex=REGEX)

CASES = [
    pytest.param({"rule": Rule.REJECTION}, id="rejection"),
    pytest.param(
        {"rule": Rule.BLOCK, "temperature": 1.3, "frequency_penalty": 0.4}, id="block", marks=pytest.mark.slow
    ),
    pytest.param({"rule": Rule.GUMBEL, "top_p": 0.8}, id="gumbel", marks=pytest.mark.slow),
    pytest.param({"rule": Rule.GUMBEL, "max_depth": 3, "num_draft_tokens": 8}, id="trees"),
    pytest.param({"rule": Rule.KSEQ, "logit_bias": {5: -1.0, 8: 1.5}}, id="kseq", marks=pytest.mark.slow),
    pytest.param({"rule": Rule.REJECTION, "draft": "ngram", "top_k": 3}, id="ngram", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    options = {"num_draft_tokens": "3", "num_outcomes": "2"}
    pair = save_speakers(tmp_path_factory.mktemp("speakers"), 0.7, 3)
    with local_stack(*pair, coordinator_options=options) as running:
        yield running


@pytest.fixture(scope="module")
def in_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """With the draft in the target's process."""
    target, draft = save_speakers(tmp_path_factory.mktemp("speakers"), 0.7, 3)
    options = {"num_draft_tokens": "3"}
    with local_stack(
        target, coordinator_options=options, verify_options={"draft_model": str(draft)}
    ) as running:
        yield running


def sampled(
    stack: LocalStack, settings: dict[str, Any], num_texts: int = NUM_TEXTS, grammar: Grammar = GRAMMAR
) -> list[Completion]:
    """Texts with seeds 0, 1, ..."""
    params = SamplingParams(**settings, grammar=grammar, max_tokens=60)
    return together.sampled(stack.address, params, range(num_texts), PROMPT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("settings", [{"rule": Rule.BLOCK}, {"rule": Rule.GUMBEL, "max_depth": 3}])
def test_they_do_with_the_draft_in_the_targets_process(
    in_target: LocalStack, logits: torch.Tensor, settings: dict[str, Any]
) -> None:
    test_texts_follow_the_masked_distribution(in_target, logits, settings)


@pytest.mark.parametrize("settings", CASES)
def test_texts_follow_the_masked_distribution(
    stack: LocalStack, logits: torch.Tensor, settings: dict[str, Any]
) -> None:
    texts = sampled(stack, settings)
    assert all(done.finish_reason is FinishReason.STOP and re.fullmatch(REGEX, done.text) for done in texts)
    drafted = sum(done.speculation.num_draft_tokens for done in texts)
    accepted = sum(done.speculation.num_accepted_tokens for done in texts)
    assert drafted > NUM_TEXTS
    assert 0 < accepted < drafted
    params = SamplingParams(**settings)
    assert fit_p_value(texts, logits, params, allowed=allowed) > FALSE_ALARM_RATE
    if settings == {"rule": Rule.REJECTION}:  # Negative controls: no other temperature or grammar fits.
        assert fit_p_value(texts, logits, SamplingParams(temperature=2.0), allowed=allowed) < CLEARLY_WRONG
        assert fit_p_value(texts, logits, params, allowed=without_cd) < CLEARLY_WRONG


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.GUMBEL])
def test_forced_text_is_a_draft(stack: LocalStack, logits: torch.Tensor, rule: Rule) -> None:
    """The target chooses how it is spelled."""
    texts = sampled(
        stack, {"rule": rule, "draft": "ngram", "num_draft_tokens": 6}, grammar=Grammar(regex=FORCED)
    )
    counts = [each for done in texts for each in done.speculation.by_source if each.source == GRAMMAR_SOURCE]
    accepted = sum(each.num_accepted_tokens for each in counts)
    assert NUM_TEXTS < accepted < sum(each.num_draft_tokens for each in counts)
    forced = partial(allowed, expression=FORCED)
    assert fit_p_value(texts, logits, SamplingParams(), allowed=forced) > FALSE_ALARM_RATE


def test_what_asks_for_plain_decoding_has_no_forced_draft(stack: LocalStack) -> None:
    for plain in ({"draft": "off"}, {"num_draft_tokens": 0}):
        [done] = sampled(stack, plain, 1, Grammar(regex=FORCED))
        assert done.speculation.num_draft_tokens == 0


def without_cd(output: Sequence[int]) -> npt.NDArray[np.bool_]:
    """A narrower grammar: no `cd` after the first token."""
    fits = allowed(output)
    fits[TEXTS.index("cd")] &= not output
    return fits


def test_masks_that_ignore_the_drafts_before_them_are_found_out(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: every position of a round has the mask of its first one."""
    after = GrammarMatcher._after

    def of_the_base(matcher: GrammarMatcher, drafts: Any, parents: Any) -> Bits:
        return np.repeat(after(matcher, drafts, parents)[:1], len(drafts) + 1, axis=0)

    monkeypatch.setattr(GrammarMatcher, "_after", of_the_base)
    with pytest.raises(InvalidRequestError, match="does not match the grammar"):
        sampled(stack, {"rule": Rule.GUMBEL}, 20)


@pytest.mark.parametrize("settings", [{}, {"max_depth": 3, "num_draft_tokens": 8}, {"draft": "ngram"}])
def test_greedy_texts_are_those_of_plain_decoding(
    stack: LocalStack, logits: torch.Tensor, settings: dict[str, Any]
) -> None:
    expected: list[int] = []
    while not expected or expected[-1] != END_ID:
        scores = logits[[*PROMPT, *expected][-1]].clone()
        scores[~torch.from_numpy(allowed(expected))] = -torch.inf
        expected.append(int(scores.argmax()))
    params = SamplingParams(temperature=0, grammar=GRAMMAR, max_tokens=60, **settings)
    done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
    assert list(done.token_ids) == expected
    assert done.text == "".join(TEXTS[token_id] for token_id in expected)


def test_a_gumbel_text_is_fixed_by_its_seed(stack: LocalStack) -> None:
    """With any draft, or none."""
    params: dict[str, Any] = {"rule": Rule.GUMBEL, "seed": 5, "grammar": GRAMMAR, "max_tokens": 60}
    drafts: list[dict[str, Any]] = [{"draft": "off"}, {}, {"num_draft_tokens": 7}, {"draft": "ngram"}]
    texts = {
        stack.client.generate(params=SamplingParams(**params, **each), prompt_token_ids=PROMPT).token_ids
        for each in [*drafts, {"max_depth": 4, "num_draft_tokens": 12}]
    }
    assert len(texts) == 1
