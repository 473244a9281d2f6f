"""Drafts from the text itself leave the text of greedy decoding and of Gumbel coupling as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specwire import Completion, Rule, SamplingParams
from tests.support.harness import LocalStack, local_stack
from tests.support.pairs import save_hostile_draft, save_target

PROMPT = [5, 9, 11, 2, 7, 4, 5, 9, 11, 3]
CONFIG = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}'
OPTIONS = {"speculative_config": CONFIG, "num_draft_tokens": "auto"}


@pytest.fixture(scope="module", params=["alone", "beside a hostile model"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory: Path = tmp_path_factory.mktemp("ngram")
    draft = None if request.param == "alone" else save_hostile_draft(directory / "draft")
    with local_stack(save_target(directory / "target"), draft, coordinator_options=OPTIONS) as running:
        yield running


def generate(stack: LocalStack, temperature: float, num_draft_tokens: int | None) -> Completion:
    params = SamplingParams(
        max_tokens=80,
        temperature=temperature,
        rule=Rule.GUMBEL,
        seed=4,
        ignore_eos=True,
        num_draft_tokens=num_draft_tokens,
    )
    return stack.client.generate(params=params, prompt_token_ids=PROMPT)


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, temperature: float) -> None:
    plain = generate(stack, temperature, 0)
    assert plain.speculation.by_source == ()
    for num_draft_tokens in (None, 1, 5, 13):
        done = generate(stack, temperature, num_draft_tokens)
        assert done.token_ids == plain.token_ids
        [ngram] = [each for each in done.speculation.by_source if each.source == "ngram"]
        assert ngram.num_draft_tokens > 0
        assert ngram.num_accepted_tokens > 0 or temperature > 0, "a greedy text of this model repeats itself"
        by_source = done.speculation.by_source
        assert sum(each.num_draft_tokens for each in by_source) == done.speculation.num_draft_tokens
        assert num_draft_tokens is None or len(done.speculation.drafted_per_position) == num_draft_tokens
