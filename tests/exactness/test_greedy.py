"""Greedy text, in float32, is token for token that of transformers' own `generate`, with any draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specwire import SamplingParams
from tests.support import tiny_models
from tests.support.harness import local_stack
from tests.support.pairs import save_good_draft, save_hostile_draft, save_target
from tests.support.tiny_models import written_by_transformers

NUM_TOKENS = 40
PROMPTS = [[5, 9, 11, 2, 7], [3] * 20 + [8, 1, 30], [64]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, *tiny_models.RECURRENT_FAMILIES])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, family: str) -> None:
    target = save_target(tmp_path / "target", family)
    expected = [written_by_transformers(tiny_models.build(family), prompt, NUM_TOKENS) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, num_draft_tokens=4)
    accepted = {}
    for kind, save in (("good", save_good_draft), ("hostile", save_hostile_draft)):
        draft = save(tmp_path / kind, family)
        with local_stack(target, draft) as stack:
            done = [stack.client.generate(params=params, prompt_token_ids=prompt) for prompt in PROMPTS]
            stack.assert_idle_within(1.0)
        assert [list(completion.token_ids) for completion in done] == expected
        accepted[kind] = sum(completion.speculation.draft_acceptance_rate for completion in done) / len(done)
    assert accepted["good"] > 0.3, "the good draft was meant to be accepted often"
    assert accepted["hostile"] < 0.1, "the hostile draft was meant to be refused"


def test_greedy_with_history_processors_is_that_of_transformers(tmp_path: Path) -> None:
    biases = {7: 3.0, 12: -5.0}
    ours: list[dict[str, Any]] = [{"repetition_penalty": 1.3}, {"logit_bias": biases}]
    theirs = [ours[0], {"sequence_bias": {(token_id,): bias for token_id, bias in biases.items()}}]
    target, draft = save_target(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    with local_stack(target, draft) as stack:
        for settings, options in zip(ours, theirs, strict=True):
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **settings)
            for prompt in PROMPTS:
                done = stack.client.generate(params=params, prompt_token_ids=prompt)
                model = tiny_models.build("llama")
                assert list(done.token_ids) == written_by_transformers(model, prompt, NUM_TOKENS, **options)


def test_a_draft_that_is_its_target_is_always_right(tmp_path: Path) -> None:
    """Each round commits γ + 1 tokens, and the draft's cache lacks two of them."""
    target, prompt = save_target(tmp_path / "target"), PROMPTS[0]
    greedy = SamplingParams(temperature=0, max_tokens=61, ignore_eos=True, num_draft_tokens=4)
    sampled = SamplingParams(max_tokens=61, ignore_eos=True, num_draft_tokens=4, seed=1)
    with local_stack(target, target) as stack:
        done = [stack.client.generate(params=each, prompt_token_ids=prompt) for each in (greedy, sampled)]
    assert list(done[0].token_ids) == written_by_transformers(tiny_models.build("llama"), prompt, 61)
    for completion in done:
        assert completion.speculation.draft_acceptance_rate == 1.0
        assert completion.speculation.num_rounds == 13  # 12 of 5 tokens, and the last one
