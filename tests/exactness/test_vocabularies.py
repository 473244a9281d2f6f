"""A draft with another vocabulary than the target: the target's distribution, and the text of plain decoding.

Distributions are tested as in `test_wire_distributions.py`, on a pair that shares ten of sixteen tokens.
Texts are those of the embedded target with its draft, whose tables are rearranged for a tokenizer learnt
here.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.embedded import corpus
from draft_service.drafter import DraftDecider, Question
from draft_service.scores import SharedScores
from specwire import Client, Completion, Rule, SamplingParams, embedded
from specwire.config.link import Link
from specwire.rule.columns import Places
from tests.support import pairs
from tests.support.harness import LocalStack, float32_processes, local_stack
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.pairs import MARKOV_VOCAB_SIZE
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.together import sampled
from tests.support.vocabularies import byte_level_backend, letters, save_tokenizer

TARGET_LETTERS = string.ascii_lowercase[:MARKOV_VOCAB_SIZE]
DRAFT_LETTERS = "jqbsdrhuftalvcno"
"""Ten of the target's sixteen, at other places, and six others."""
CONFIG = json.dumps({"method": "draft_model", "use_heterogeneous_vocab": True})
NUM_STREAMS, LENGTH = 64, 50


def save_markov_pair(directory: Path) -> tuple[Path, Path]:
    """A target and a draft whose next token depends on the last alone."""
    target, draft = pairs.save_markov_pair(directory, 0.6, 1)
    assert len({*TARGET_LETTERS} & {*DRAFT_LETTERS}) == 10
    for tokens, model in ((TARGET_LETTERS, target), (DRAFT_LETTERS, draft)):
        save_tokenizer(letters(tokens), model)
    return target, draft


class TestDistributions:
    """χ² over the wire, with a draft that lacks six of the target's sixteen tokens."""

    @pytest.fixture(scope="class")
    @classmethod
    def address(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        """Of real processes."""
        target, draft = save_markov_pair(tmp_path_factory.mktemp("letters"))
        with float32_processes(
            target, draft, num_draft_tokens="3", num_outcomes="8", speculative_config=CONFIG
        ) as address:
            yield address

    @pytest.mark.slow
    @pytest.mark.parametrize("rule", list(Rule))
    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"temperature": 0.8, "top_p": 0.9, "logit_bias": {2: 1.5, 7: -2.0, 15: 1.0}},
            {"repetition_penalty": 1.6, "presence_penalty": 1.2, "frequency_penalty": 0.7, "max_tokens": 25},
        ],
        ids=["plain", "cold", "penalised"],
    )
    def test_every_rule_follows_the_target(
        self, address: str, logits: Tensor, rule: Rule, settings: dict[str, Any]
    ) -> None:
        """And what is drafted is drawn from what the draft says: else more would be accepted, or less."""
        done, params = sample(address, {"rule": rule, "max_tokens": LENGTH, **settings})
        assert fit_p_value(done, logits, params) > FALSE_ALARM_RATE / 9
        speculations = [each.speculation for each in done]
        drafted = sum(each.num_draft_tokens for each in speculations)
        assert drafted > sum(len(each.token_ids) for each in done) / 2
        assert 0.05 * drafted < sum(each.num_accepted_tokens for each in speculations) < 0.9 * drafted
        assert not any(each.draft_unavailable for each in speculations)

    @pytest.mark.slow
    def test_tokens_that_are_left_out_after_the_draw_are_caught(
        self, tmp_path: Path, logits: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Control: the draft samples of all its tokens, and says the likeliest shared one for those that the
        target lacks, while its supports say what they would if those had been left out before."""
        lost: list[Tensor] = []
        of_target, draw = SharedScores.of_target, DraftDecider._draw

        def noted(self: SharedScores, own_logits: Tensor) -> Tensor:
            scores = of_target(self, own_logits)
            lost.append(1 - scores.exp().sum(dim=-1))
            return scores

        def too_late(self: DraftDecider, question: Question, scores: Tensor, places: Places | None) -> Any:
            token_ids, ids, *others = draw(self, question, scores, places)
            is_lost = torch.from_numpy(np.random.default_rng(len(lost)).random(len(ids))) < lost[-1]
            return [torch.where(is_lost, ids[:, 0], token_ids), ids, *others]

        monkeypatch.setattr(SharedScores, "of_target", noted)
        monkeypatch.setattr(DraftDecider, "_draw", too_late)
        target, draft = save_markov_pair(tmp_path)
        with heterogeneous(target, draft) as stack:
            settings = {"rule": Rule.REJECTION, "max_tokens": 2 * LENGTH}
            done, params = sample(stack.address, settings)
        assert fit_p_value(done, logits, params) < CLEARLY_WRONG

    @pytest.mark.slow
    def test_nothing_is_prepared_where_tokens_are_sampled(self, address: str) -> None:
        """The time of a branch would depend on tokens that are not judged yet."""
        done, _ = sample(address, {"rule": Rule.REJECTION, "max_tokens": LENGTH})
        assert sum(each.speculation.num_prepared for each in done) == 0


def heterogeneous(target: Path | str, draft: Path | str, **given: Any) -> Any:
    """Services in this process; `given` as of `local_stack`."""
    given["draft_options"] = {"target_tokenizer": str(target)} | given.get("draft_options", {})
    given["coordinator_options"] = {"speculative_config": CONFIG} | given.get("coordinator_options", {})
    return local_stack(target, draft, **given)


def sample(address: str, settings: dict[str, Any]) -> tuple[list[Completion], SamplingParams]:
    """3,200 tokens, or half as many in short generations."""
    params = SamplingParams(**settings, ignore_eos=True)
    return sampled(address, params, range(NUM_STREAMS), PROMPT), params


# --- texts ------------------------------------------------------------------------------------------------

PROMPT_TEXT = "class Reader:\n    def __init__(self, path):\n        self."
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
GUMBEL = SamplingParams(rule=Rule.GUMBEL, seed=3, max_tokens=64, ignore_eos=True, temperature=0.8)
KINDS = pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.2, logit_bias={400: 2.0}),
        GUMBEL,
        replace(GUMBEL, top_p=0.95, presence_penalty=0.4, logit_bias={400: 2.0}),
    ],
    ids=["greedy", "greedy, edited", "gumbel", "gumbel, edited"],
)


@pytest.fixture(scope="module")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded draft with a tokenizer of its own, not trained."""
    documents, _ = corpus.split(corpus.read_library())
    names = "<s>", "</s>"
    backend = byte_level_backend((each.text for each in documents[::40]), 1200, names)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=names[0], eos_token=names[1], clean_up_tokenization_spaces=False
    )
    model = _with_tokenizer(embedded.DRAFT_DIR, tokenizer)
    directory = tmp_path_factory.mktemp("other")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def stack(other_draft: Path) -> Iterator[LocalStack]:
    with heterogeneous("embedded", other_draft, coordinator_options={"num_outcomes": "8"}) as running:
        yield running


def generate(client: Client, params: SamplingParams, prompt: str = PROMPT_TEXT) -> Completion:
    return client.generate(prompt, params=params)


CHAINS = [{"num_draft_tokens": num} for num in (1, 4, 9)]
TREES = [{"num_draft_tokens": num, "max_depth": depth} for num, depth in ((1, 1), (12, 4), (64, 8))]
"""Their nodes are shared tokens."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "shapes", [pytest.param(CHAINS, id="chains"), pytest.param(TREES, id="trees", marks=pytest.mark.slow)]
)
@KINDS
def test_text_is_that_of_plain_decoding(
    stack: LocalStack, params: SamplingParams, shapes: list[dict[str, Any]]
) -> None:
    expected = generate(stack.client, replace(params, num_draft_tokens=0))
    for shape in shapes:
        done = generate(stack.client, replace(params, **shape))
        assert done.token_ids == expected.token_ids
        assert not done.speculation.draft_unavailable
    assert done.speculation.num_accepted_tokens > 4
    stack.assert_idle_within(2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [replace(GREEDY, repetition_penalty=1.2), GUMBEL], ids=["greedy", "gumbel"]
)
def test_prepared_outcomes(other_draft: Path, params: SamplingParams) -> None:
    """With time to work ahead, proposals are there before they are asked for. Not so in a text that repeats
    one line: with some tokenizers (they are learnt from the interpreter's library) the draft lacks the token
    of each outcome."""
    options = {"num_outcomes": "16"}
    with heterogeneous(
        "embedded", other_draft, coordinator_options=options, verify_link=Link(rtt_ms=100)
    ) as running:
        expected = generate(running.client, replace(params, num_draft_tokens=0))
        for max_depth in (0, 4):
            done = generate(running.client, replace(params, num_draft_tokens=4, max_depth=max_depth))
            assert done.token_ids == expected.token_ids
            assert done.speculation.num_prepared > 1
        running.assert_idle_within(2.0)


@pytest.mark.slow
def test_a_text_outside_of_the_drafts_vocabulary(stack: LocalStack) -> None:
    """Characters that both spell in bytes, and special tokens in the middle of a text."""
    for prompt in ("x = '你好,世界 👋🏽'\n", "a<|endoftext|>def f(x):\n    ", "\n\n        "):
        for params in (GREEDY, GUMBEL):
            expected = generate(stack.client, replace(params, num_draft_tokens=0), prompt)
            done = generate(stack.client, params, prompt)
            assert done.token_ids == expected.token_ids
            assert not done.speculation.draft_unavailable


@pytest.mark.slow
def test_the_cache_is_rolled_back_as_far_as_needed(stack: LocalStack) -> None:
    """A round runs its committed tokens, the few before them that are cut otherwise now, and its drafts."""
    prompt = "\n".join(f"value_{i} = compute(value_{i + 1}, {i})" for i in range(60))
    before = stack.status("draft").num_tokens
    done = generate(stack.client, replace(GREEDY, max_tokens=100, num_draft_tokens=4), prompt)
    num_run = stack.status("draft").num_tokens - before
    rounds = done.speculation.num_rounds
    assert num_run < done.usage.prompt_tokens * 1.5 + 100 + rounds * (4 + 8)


def _with_tokenizer(source: Path, other: PreTrainedTokenizerFast) -> Any:
    """A Llama for another tokenizer: a token is read as the last of the old tokens of its text, and written
    as the first of them."""
    old = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    ours = PreTrainedTokenizerFast.from_pretrained(source)
    size = max(other.get_vocab().values()) + 1
    parts = [[0]] * size
    for name, token_id in other.get_vocab().items():
        known = ours.get_vocab().get(name)
        spelt = ours.encode(other.decode([token_id]), add_special_tokens=False)
        parts[token_id] = [known] if known is not None else spelt or [0]
    for special in other.all_special_ids:
        parts[special] = [ours.eos_token_id]
    weights = old.state_dict()
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][[part[-1] for part in parts]]
    weights["lm_head.weight"] = weights["lm_head.weight"][[part[0] for part in parts]]
    names = {"vocab_size": size, "bos_token_id": other.bos_token_id, "eos_token_id": other.eos_token_id}
    new = LlamaForCausalLM(LlamaConfig(**old.config.to_dict() | names))
    new.load_state_dict(weights)
    return new
