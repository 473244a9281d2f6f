"""What ends an output, and its log probabilities, through the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specwire import Client, Completion, FinishReason, SamplingParams
from specwire.text.tokenizer import Tokenizer
from tests.support.harness import local_stack

PROMPT = "The quick brown"


@pytest.fixture(scope="module", params=["greedy", "rejection", "gumbel"])
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "greedy":
        return {"temperature": 0.0, "seed": 1}
    return {"rule": request.param, "seed": 1}


@pytest.fixture(scope="module")
def free(client: Client, sampling: dict[str, Any]) -> Completion:
    done = client.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, **sampling))
    assert done.finish_reason is FinishReason.LENGTH
    assert done.stop_reason is None
    assert len(done.token_ids) == 60
    return done


def test_a_stop_string_while_the_target_goes_on(pair: tuple[Path, Path]) -> None:
    """What it has begun after the string is dropped, and freed."""
    options = {"num_outcomes": "8", "num_draft_tokens": "3"}
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    target = pair[0]
    with local_stack(
        target, target, coordinator_options=options, verify_options={"least_pass_ms": 40.0}
    ) as stack:
        free = stack.client.generate(PROMPT, params)
        stop = free.text[20:23]
        done = stack.client.generate(PROMPT, replace(params, stop=(stop,)))
        assert done.speculation.num_prepared > 0
        assert done.text == free.text[: free.text.index(stop)]
        assert done.stop_reason == stop
        stack.assert_idle_within(2.0)


class TestStops:
    """Each against the same generation without the stop condition."""

    def test_a_stop_string_over_token_borders(
        self, client: Client, sampling: dict[str, Any], free: Completion, tokenizer: Tokenizer
    ) -> None:
        texts_ = [token.text for token in free.tokens]
        i = next(i for i in range(20, 50) if len(texts_[i]) >= 1 and len(texts_[i + 1]) >= 1)
        stop = texts_[i][-1] + texts_[i + 1][0]
        cut = free.text.index(stop)
        done = client.generate(
            PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, stop=(stop,), **sampling)
        )
        assert done.text == free.text[:cut]
        assert done.finish_reason is FinishReason.STOP
        assert done.stop_reason == stop
        assert done.token_ids == free.token_ids[: len(done.token_ids)]
        assert stop in tokenizer.decode(done.token_ids)
        assert stop not in tokenizer.decode(done.token_ids[:-1])

    def test_a_stop_id_is_in_the_ids_and_not_in_the_text(
        self, client: Client, sampling: dict[str, Any], free: Completion, tokenizer: Tokenizer
    ) -> None:
        stop_id = free.token_ids[25]
        at = free.token_ids.index(stop_id)
        params = SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=(stop_id,), **sampling)
        done = client.generate(PROMPT, params)
        assert done.token_ids == free.token_ids[: at + 1]
        assert done.text == tokenizer.decode(free.token_ids[:at])
        assert done.finish_reason is FinishReason.STOP
        assert done.stop_reason == stop_id
        assert done.usage.completion_tokens == at + 1

    @pytest.mark.sample(1)
    def test_none_ends_the_first_tokens(self, client: Client, sampling: dict[str, Any]) -> None:
        """Neither an end token, which is replaced, nor a stop string, which stays."""
        eos, params = 2, {"max_tokens": 30, "min_tokens": 9} | sampling
        done = client.generate(PROMPT, SamplingParams(logit_bias={eos: 100.0}, **params))
        assert done.token_ids.index(eos) == 9
        assert done.finish_reason is FinishReason.STOP
        both: dict[str, Any] = {"logit_bias": {eos: 100.0, 7: 99.0}, "stop_token_ids": (7,)}
        assert not {eos, 7} & {*client.generate(PROMPT, SamplingParams(**both, **params)).token_ids[:9]}
        ignored = client.generate(PROMPT, SamplingParams(logit_bias={eos: 9.0}, ignore_eos=True, **params))
        assert eos not in ignored.token_ids[:9]
        free = client.generate(PROMPT, SamplingParams(ignore_eos=True, **params))
        stop = next(token.text for token in free.tokens[2:9] if token.text)
        stopped = client.generate(PROMPT, SamplingParams(ignore_eos=True, stop=(stop,), **params))
        assert stopped.token_ids[:9] == free.token_ids[:9]

    def test_end_of_sequence_ends_unless_ignored(self, client: Client, sampling: dict[str, Any]) -> None:
        eos = 2
        params: dict[str, Any] = {"max_tokens": 20, "logit_bias": {eos: 100.0}} | sampling
        done = client.generate(PROMPT, SamplingParams(**params))
        assert done.token_ids == (eos,)
        assert (done.finish_reason, done.stop_reason, done.text) == (FinishReason.STOP, eos, "")
        done = client.generate(PROMPT, SamplingParams(**params, ignore_eos=True))
        assert done.token_ids == (eos,) * 20
        assert (done.finish_reason, done.stop_reason) == (FinishReason.LENGTH, None)

    @pytest.mark.parametrize("max_tokens", [1, 6])
    def test_max_tokens_is_exact(
        self, client: Client, sampling: dict[str, Any], free: Completion, max_tokens: int
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        done = client.generate(PROMPT, params)
        assert len(done.token_ids) == max_tokens == done.usage.completion_tokens
        assert done.finish_reason is FinishReason.LENGTH
        if sampling.get("rule") != "rejection":  # a shorter last round draws other uniforms there
            assert done.token_ids == free.token_ids[:max_tokens]

    @pytest.mark.sample(2)
    def test_logprobs_are_those_of_the_raw_target(
        self, client: Client, sampling: dict[str, Any], pair: tuple[Path, Path], tokenizer: Tokenizer
    ) -> None:
        warps: dict[str, Any] = {"top_k": 20, "presence_penalty": 0.5, "logit_bias": {7: 3.0}}
        if sampling.get("temperature") != 0.0:
            warps |= {"temperature": 0.8}
        params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=4, **warps, **sampling)
        done = client.generate(PROMPT, params)
        prompt = tokenizer.encode(PROMPT)
        expected = raw_logprobs(pair[0], [*prompt, *done.token_ids])[len(prompt) - 1 : -1]
        for token, row in zip(done.tokens, expected, strict=True):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
            values, ids = row.topk(4)
            assert [t for t, _ in token.top_logprobs] == ids.tolist()
            assert [v for _, v in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)

    @pytest.mark.sample(1)
    def test_logprobs_zero_reports_the_token_alone(self, client: Client, sampling: dict[str, Any]) -> None:
        done = client.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=0, **sampling))
        assert all(token.logprob is not None and token.top_logprobs == () for token in done.tokens)
        assert done.to_dict()["logprobs"][0].keys() == {"token_id", "logprob", "top_logprobs"}
        without = client.generate(PROMPT, SamplingParams(max_tokens=12, **sampling))
        assert without.token_ids == done.token_ids
        assert without.to_dict()["logprobs"] is None


def raw_logprobs(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """The model's own, [num_tokens, vocab_size]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
