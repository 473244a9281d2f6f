"""Drafts from text leave the text of greedy decoding and of Gumbel coupling as it is."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specwire import Completion, InvalidRequestError, Rule, SamplingParams
from specwire.config.speculative import METHODS, NGRAM
from tests.support.harness import LocalStack, local_stack
from tests.support.pairs import save_hostile_draft, save_target

PROMPT = [5, 9, 11, 2, 7, 4, 5, 9, 11, 3]
CONFIG = '{"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}'
OPTIONS = {"speculative_config": CONFIG, "num_draft_tokens": "auto"}


@pytest.fixture(scope="module", params=["alone", "beside a hostile model"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory: Path = tmp_path_factory.mktemp("text")
    draft = None if request.param == "alone" else save_hostile_draft(directory / "draft")
    with local_stack(save_target(directory / "target"), draft, coordinator_options=OPTIONS) as running:
        yield running


def generate(
    stack: LocalStack,
    temperature: float,
    num_draft_tokens: int | None,
    draft: str | None = None,
    cache_salt: str = "",
    rule: Rule = Rule.GUMBEL,
) -> Completion:
    params = SamplingParams(
        max_tokens=80,
        temperature=temperature,
        rule=rule,
        seed=4,
        ignore_eos=True,
        num_draft_tokens=num_draft_tokens,
        draft=draft,
        cache_salt=cache_salt,
    )
    return stack.client.generate(params=params, prompt_token_ids=PROMPT)


def sources(done: Completion) -> set[str]:
    return {each.source for each in done.speculation.by_source}


@pytest.mark.sample(1)
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, temperature: float) -> None:
    plain = generate(stack, temperature, 0)
    assert plain.speculation.by_source == ()
    for num_draft_tokens in (None, 1, 5, 13):
        done = generate(stack, temperature, num_draft_tokens)
        assert done.token_ids == plain.token_ids
        [ngram] = [each for each in done.speculation.by_source if each.source == NGRAM]
        assert ngram.num_draft_tokens > 0
        assert ngram.num_accepted_tokens > 0 or temperature > 0, "a greedy text of this model repeats itself"
        by_source = done.speculation.by_source
        assert sum(each.num_draft_tokens for each in by_source) == done.speculation.num_draft_tokens
        assert num_draft_tokens is None or len(done.speculation.drafted_per_position) == num_draft_tokens


@pytest.mark.sample(2)
@pytest.mark.parametrize("temperature", [0.0, 0.4])
@pytest.mark.parametrize("method", METHODS[1:])
def test_every_method_of_a_request(stack: LocalStack, method: str, temperature: float) -> None:
    """The same text with what the request names, and again with its own output to draft from."""
    plain = generate(stack, temperature, None, "off")
    assert plain.speculation.num_draft_tokens == 0
    for num_draft_tokens in (None, 3):
        done = [generate(stack, temperature, num_draft_tokens, method, cache_salt=method) for _ in range(2)]
        assert {each.token_ids for each in done} == {plain.token_ids}
        assert sources(done[1]) == {method}


@pytest.mark.sample(1)
def test_earlier_outputs_are_those_of_the_same_salt(stack: LocalStack) -> None:
    """The second request of a salt knows the first one's output: it takes fewer rounds."""
    salts = ("", "", "mine", "mine", "other")
    unsalted, again, first, second, other = (
        generate(stack, 0.4, 8, "suffix", salt).speculation.num_rounds for salt in salts
    )
    assert second < 0.5 * first
    assert {unsalted, again, other} == {first}


@pytest.mark.sample(1)
def test_random_numbers_are_used_once_where_earlier_outputs_are_read(stack: LocalStack) -> None:
    """Under rejection sampling a token of an earlier output was drawn with the numbers of its seed: if
    they judged it again, the output would not be exact. Without earlier outputs a seed repeats its text."""

    def texts(draft: str, salt: str) -> set[tuple[int, ...]]:
        return {generate(stack, 1.0, 3, draft, salt, Rule.REJECTION).token_ids for _ in range(2)}

    assert len(texts("suffix", "salted")) == 2
    assert len(texts("suffix", "")) == len(texts("ngram", "salted")) == 1


def test_counts_of_a_corpus() -> None:
    """With the embedded target, whose tokenizer encodes the file; a request can name the method too."""
    config = {"method": "bigram", "corpus": textwrap.__file__}
    with local_stack("embedded", coordinator_options={"speculative_config": json.dumps(config)}) as stack:
        params = SamplingParams(max_tokens=48, temperature=0)
        plain, done, named = (
            stack.client.generate("class Reader:\n    def __init__(self", replace(params, draft=draft))
            for draft in ("off", None, "bigram")
        )
    assert plain.text == done.text == named.text
    assert sources(done) == {"bigram"}
    assert done.speculation.num_accepted_tokens > 0
    assert named.speculation.by_source == done.speculation.by_source


class TestTheChoice:
    @pytest.mark.sample(1)
    def test_with_and_without_a_model(self, stack: LocalStack) -> None:
        """`model` is refused by name where there is none, and else proposes alone or beside a method."""
        if not stack.draft_address:
            for draft in ("model", "suffix,model"):
                with pytest.raises(InvalidRequestError, match=f"draft={draft}.*is not offered here: ngram"):
                    generate(stack, 0.0, 3, draft)
            return
        assert len(model := sources(generate(stack, 0.0, 3, "model"))) == 1
        assert not model & {*METHODS}
        assert sources(generate(stack, 0.4, 3, f"suffix,{model.copy().pop()}")) <= {*model, "suffix"}

    @pytest.mark.parametrize("draft", ["eagle", "ngram,", "ngram,suffix", "off,model", "model,ngram"])
    def test_what_is_not_offered_is_refused_by_name(self, stack: LocalStack, draft: str) -> None:
        with pytest.raises(InvalidRequestError, match="is not offered here") as raised:
            generate(stack, 0.0, None, draft)
        assert raised.value.field == "draft"
