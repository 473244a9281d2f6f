"""Pages found again by their tokens: the same logits and texts, fewer tokens run, nothing held when idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specwire import Rule, SamplingParams
from specwire.engine.jobs import TokenSequence
from specwire.engine.model.runner import ModelRunner
from tests.support import tiny_models
from tests.support.harness import local_stack
from tests.support.logits_engine import LogitsEngine, Stream
from tests.support.pairs import save_good_draft, save_target
from verify_service.verifier import VerifyJob

PAGE_SIZE = 4
SEED = SamplingParams(seed=0)
PROMPT = np.random.default_rng(3).integers(3, 97, 50).tolist()


def engine_of(num_pages: int, *, prefix_sharing: bool = True, max_num_tokens: int = 256) -> LogitsEngine:
    reference = tiny_models.build("llama")

    @torch.inference_mode()
    def from_scratch(sequence: TokenSequence) -> Tensor:
        logits: Tensor = reference(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0]
        return logits.float()

    return LogitsEngine(
        ModelRunner(tiny_models.build("llama"), num_pages=num_pages, page_size=PAGE_SIZE),
        from_scratch,
        max_num_tokens=max_num_tokens,
        max_prefill_tokens=max_num_tokens,
        prefix_sharing=prefix_sharing,
    )


@pytest.fixture
def engine() -> Iterator[LogitsEngine]:
    made = engine_of(64)
    yield made
    made.close()


@pytest.mark.parametrize("num_pages", [120, 26], ids=["enough memory", "evictions and preemptions"])
def test_logits_after_any_shared_history_equal_those_from_scratch(num_pages: int) -> None:
    rng = np.random.default_rng(num_pages)
    phrases = [rng.integers(3, 97, 8).tolist() for _ in range(3)]
    prompts = [PROMPT[:17], PROMPT[:24], [*PROMPT[:12], 90, 91, 92]]
    made = engine_of(num_pages, max_num_tokens=80)

    def opened() -> Stream:
        return Stream(made.engine, prompts[rng.integers(len(prompts))])

    def job(stream: Stream) -> VerifyJob:
        """Draft tokens from a few phrases, so that sequences that parted may meet again."""
        if rng.random() < 0.3:
            stream.roll_back(rng)
            stream.committed += phrases[rng.integers(len(phrases))][:2]
        return stream.job(phrases[rng.integers(len(phrases))][: rng.integers(0, 8)])

    made.run_history(rng, 150, [opened() for _ in range(4)], opened, job, replaced=0.15, max_len=60)
    status = made.engine.status()
    assert status.num_hit_tokens > 300
    assert (status.num_preemptions > 0) == (num_pages == 26)
    assert made.runner.pool.num_held_pages == 0
    assert made.runner.pool.num_free_pages == num_pages
    made.close()


def test_a_prefix_is_found_while_its_first_stream_runs_and_after_it_ended(engine: LogitsEngine) -> None:
    first = engine.engine.open(SEED, 50)
    assert engine.verify(first, 0, PROMPT, []).num_cached_tokens == 0
    second = engine.engine.open(SEED, 50)
    assert engine.verify(second, 0, PROMPT, []).num_cached_tokens == 48
    assert engine.runner.pool.num_held_pages == 12 + 2, "twelve pages are shared, the last one is not"
    for sequence in (first, second):
        engine.engine.close_sequence(sequence)
    engine.settle()
    pool = engine.runner.pool
    assert (pool.num_held_pages, pool.num_cached_pages) == (0, 12)
    third = engine.engine.open(SEED, 50)
    assert engine.verify(third, 0, PROMPT, []).num_cached_tokens == 48
    assert engine.engine.status().num_tokens == 50 + 2 + 2
    assert engine.engine.status().num_hit_tokens == 96


def test_rows_whose_logits_are_wanted_are_run_in_any_case(engine: LogitsEngine) -> None:
    first = engine.engine.open(SEED, 48)
    engine.verify(first, 0, PROMPT[:48], [])
    second = engine.engine.open(SEED, 40)
    job = engine.verify(second, 0, PROMPT[:41], PROMPT[41:48])
    assert (job.num_rows, job.num_cached_tokens) == (8, 40)
    third = engine.engine.open(SEED, 40)
    assert engine.verify(third, 0, PROMPT[:40], PROMPT[40:48]).num_cached_tokens == 36
    fourth = engine.engine.open(SEED, 48)
    assert engine.verify(fourth, 0, PROMPT[:48], []).num_cached_tokens == 44


def test_rejected_draft_tokens_are_known_until_they_are_overwritten(engine: LogitsEngine) -> None:
    first = engine.engine.open(SEED, 8)
    engine.verify(first, 0, PROMPT[:9], PROMPT[9:16])
    assert engine.verify(engine.engine.open(SEED, 8), 0, PROMPT[:17], []).num_cached_tokens == 16
    alone = [8, *PROMPT[:15]]
    engine.verify(sequence := engine.engine.open(SEED, 8), 0, alone[:9], alone[9:])
    engine.verify(sequence, 10, [50], [51])  # into the third page, which it holds alone
    engine.settle()
    again = engine.verify(engine.engine.open(SEED, 8), 0, [*alone, 3], [])
    assert again.num_cached_tokens == 8


def test_a_preempted_sequence_finds_what_was_not_needed() -> None:
    made = engine_of(20)
    old, young = made.engine.open(SEED, 5), made.engine.open(SEED, 5)
    made.verify(young, 0, PROMPT[:40], [])
    made.verify(old, 0, PROMPT[::-1][:44], [])  # eleven pages: one more than are free
    assert made.engine.status().num_preemptions == 1
    job = made.verify(young, 40, [9], [])
    assert 0 < job.num_cached_tokens <= 36
    made.settle()
    made.close()


def test_the_second_request_hits_and_says_the_same(tmp_path: Path) -> None:
    pair = save_target(tmp_path / "target"), save_good_draft(tmp_path / "draft")
    params = SamplingParams(seed=4, max_tokens=20, ignore_eos=True, rule=Rule.GUMBEL)
    on, off = {"page_size": PAGE_SIZE}, {"page_size": PAGE_SIZE, "prefix_sharing": False}
    with local_stack(*pair, verify_options=off, draft_options=off) as stack:
        expected = [stack.client.generate(params=params, prompt_token_ids=PROMPT) for _ in range(2)]
        computed = stack.status("verify").num_tokens
        assert stack.status("verify").num_hit_tokens == stack.status("draft").num_hit_tokens == 0
    with local_stack(*pair, verify_options=on, draft_options=on) as stack:
        got = [stack.client.generate(params=params, prompt_token_ids=PROMPT) for _ in range(2)]
        stack.assert_idle_within(1.0)
        status = stack.status("verify")
    assert len({done.token_ids for done in (*expected, *got)}) == 1
    assert [done.usage.cached_tokens for done in expected] == [0, 0]
    # The last prompt token and five drafts are run for their logits: 50 + 5 - 6 tokens, in whole pages.
    assert [done.usage.cached_tokens for done in got] == [0, 48]
    assert got[1].to_dict()["usage"] == {"prompt_tokens": 50, "completion_tokens": 20, "cached_tokens": 48}
    assert (status.num_hit_tokens, status.num_tokens) == (48, computed - 48)
    assert status.num_cached_pages > 0
