"""Log probabilities of prompts: through the SDK against transformers, and over HTTP (`echo`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from specwire import Completion, SamplingParams, embedded
from specwire.text import tokenizer
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, fronted

LONG = [(7 * i * i + 3 * i) % 2000 for i in range(150)]
"""Judged in three passes."""
here = entered(lambda: fronted(embedded.TARGET_DIR, embedded.DRAFT_DIR))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded.TARGET_DIR, dtype=torch.float32).eval()


@torch.inference_mode()
def reference(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """float64 [len(token_ids), vocab_size]: transformers' log-softmax after each token."""
    return torch.log_softmax(model(torch.tensor([[*token_ids]])).logits[0].double(), dim=-1)


def check(done: Completion, token_ids: Sequence[int], expected: torch.Tensor, num_top: int) -> None:
    assert [token.token_id for token in done.prompt] == [*token_ids]
    first, *others = done.prompt
    assert (first.logprob, first.top_logprobs) == (None, ())
    for row, token in zip(expected, others, strict=False):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)
        best = torch.topk(row, num_top).values.tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(best, abs=2e-4)
        assert all(value == pytest.approx(float(row[i]), abs=2e-4) for i, value in token.top_logprobs)


@pytest.mark.parametrize("num_tokens", [1, 2, 65, 66, 150])
def test_they_are_transformers_log_softmax(here: Fronted, model: Any, num_tokens: int) -> None:
    """Whatever the output is sampled with, and although the prompt is in the cache after the first time."""
    token_ids = LONG[:num_tokens]
    expected = reference(model, token_ids)
    settings: dict[str, Any] = {"temperature": 0.3, "top_k": 4, "repetition_penalty": 1.5, "seed": 3}
    for max_tokens in (0, 5):
        params = SamplingParams(prompt_logprobs=3, max_tokens=max_tokens, **settings)
        done = here.stack.client.generate(prompt_token_ids=token_ids, params=params)
        check(done, token_ids, expected, 3)
        assert len(done.token_ids) == max_tokens == done.usage.completion_tokens
    plain = SamplingParams(max_tokens=5, **settings)
    assert done.token_ids == here.stack.client.generate(prompt_token_ids=token_ids, params=plain).token_ids


def test_in_a_stream_the_prompt_comes_first(here: Fronted) -> None:
    params = SamplingParams(prompt_logprobs=0, max_tokens=4, ignore_eos=True)
    with here.stack.client.stream(prompt_token_ids=LONG, params=params) as stream:
        chunks = list(stream)
    lengths = [len(chunk.prompt) for chunk in chunks if chunk.prompt]
    assert lengths == [1, 64, 64, 21]
    assert not any(chunk.tokens for chunk in chunks[: len(lengths)])
    assert sum(len(chunk.tokens) for chunk in chunks) == 4
    known = tokenizer.load(embedded.TARGET_DIR)
    assert known is not None
    assert "".join(token.text for token in stream.completion.prompt) == known.decode(LONG)
    here.stack.assert_idle_within(10)


class TestEcho:
    def complete(self, here: Fronted, **body: Any) -> Any:
        request: dict[str, Any] = {"model": here.model, "max_tokens": 3, "seed": 1, "echo": True}
        return here.openai.completions.create(**request | body)

    def test_as_lm_eval_asks(self, here: Fronted, model: Any) -> None:
        """Several prompts of token ids, one generated token."""
        prompts = [LONG[:9], LONG[20:90]]
        answer = self.complete(here, prompt=prompts, max_tokens=1, logprobs=1, temperature=0)
        for choice, token_ids in zip(answer.choices, prompts, strict=True):
            found = choice.logprobs
            rows = reference(model, token_ids)
            expected = [float(rows[i, token]) for i, token in enumerate(token_ids[1:])]
            assert found.token_logprobs[0] is None
            assert found.top_logprobs[0] is None
            assert found.token_logprobs[1 : len(token_ids)] == pytest.approx(expected, abs=2e-4)
            assert len(found.token_logprobs) == len(token_ids) + 1
            assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())
            assert len(found.text_offset) == len(found.tokens) == len(token_ids) + 1

    def test_nothing_else(self, here: Fronted) -> None:
        answer = self.complete(here, prompt="def f(x):", max_tokens=0, logprobs=2)
        assert answer.choices[0].text == "def f(x):"
        assert answer.usage.completion_tokens == 0
        assert answer.choices[0].finish_reason == "length"

    @pytest.mark.parametrize("prompt", ["def f(x):", [LONG[3], LONG[4]]])
    @pytest.mark.parametrize("logprobs", [None, 0])
    def test_the_prompt_precedes_the_text(self, here: Fronted, prompt: Any, logprobs: int | None) -> None:
        without = self.complete(here, prompt=prompt, echo=False).choices[0].text
        known = tokenizer.load(embedded.TARGET_DIR)
        assert known is not None
        shown = prompt if isinstance(prompt, str) else known.decode(prompt)
        whole = self.complete(here, prompt=prompt, logprobs=logprobs, n=2)
        assert whole.choices[0].text == shown + without
        chunks = list(self.complete(here, prompt=prompt, logprobs=logprobs, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == shown + without
        if logprobs is not None:
            parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
            offsets = [offset for part in parts for offset in part.text_offset]
            assert offsets == whole.choices[0].logprobs.text_offset

    def test_without_it_no_output_is_refused(self, here: Fronted) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            self.complete(here, prompt="x", max_tokens=0, echo=False)
        assert refused.value.param == "max_tokens"
