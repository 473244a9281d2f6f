"""Rollback on both services, driven message by message over real streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draft_service.drafter import DraftDecider, DraftJob
from specwire import Rule, SamplingParams
from specwire.config.services import DraftConfig, VerifyConfig
from specwire.core import Proposal
from specwire.engine import boot
from specwire.engine.device import LogitsDecider
from specwire.engine.jobs import Job, TokenSequence
from specwire.engine.loop import Engine
from specwire.rule.random import Purpose, uniforms
from specwire.wire import model as wire
from specwire.wire import proposals
from specwire.wire.draft import DraftOrder
from tests.support import model_streams, tiny_models
from tests.support.harness import LoopThread, local_stack
from tests.support.model_streams import raw_stream
from tests.support.pairs import save_good_draft, save_target
from verify_service.verifier import VerifyJob

PROMPT = [5, 9, 11, 2, 7]


def test_when_everything_is_accepted_the_last_draft_token_is_fed_in_the_next_round(tmp_path: Path) -> None:
    """The draft is the target, so each round commits γ + 1 tokens and the draft's cache lacks two of them."""
    target = save_target(tmp_path / "target")
    greedy = SamplingParams(temperature=0, max_tokens=61, ignore_eos=True, num_draft_tokens=4)
    with local_stack(target, target) as stack:
        done = stack.client.generate(params=greedy, prompt_token_ids=PROMPT)
        sampled = stack.client.generate(
            params=SamplingParams(max_tokens=61, ignore_eos=True, num_draft_tokens=4, seed=1),
            prompt_token_ids=PROMPT,
        )
    model = tiny_models.build("llama")
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=61, eos_token_id=None
        )
    assert list(done.token_ids) == expected[0, len(PROMPT) :].tolist()
    for completion in (done, sampled):
        assert completion.speculation.draft_acceptance_rate == 1.0
        assert completion.speculation.num_rounds == 13  # 12 of 5 tokens, and the last one


class RecordingVerifier:
    """The real engine over a real model; keeps the logits that each verify job saw."""

    def __init__(self, directory: Path) -> None:
        self.logits: dict[Job, torch.Tensor] = {}
        config = VerifyConfig(model=str(directory), dtype="float32", num_kv_tokens=4096)
        self.service = boot.start(config, "verify", LogitsDecider(self.consume))
        self.thread = LoopThread()

    def consume(self, jobs: list[Job], logits: torch.Tensor) -> None:
        start = 0
        for job in jobs:
            self.logits[job] = logits[start : start + job.num_rows].clone()
            start += job.num_rows
            job.result = True

    def verify(
        self, sequence: TokenSequence, base_len: int, tokens: list[int], draft: list[int]
    ) -> torch.Tensor:
        job = VerifyJob(sequence, base_len, tokens, draft_token_ids=draft)
        self.thread.run(self.service.engine.run(job))
        return self.logits.pop(job)

    def close(self) -> None:
        self.service.engine.close()
        self.thread.close()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_logits_after_any_history_equal_those_from_scratch(tmp_path: Path, family: str) -> None:
    """Random rounds (accepts, rejects, retries of an older base_len, re-opens) on several sequences."""
    target = save_target(tmp_path / "target", family)
    verifier = RecordingVerifier(target)
    reference = tiny_models.build(family)
    engine: Engine = verifier.service.engine
    params = SamplingParams(seed=0)
    rng = np.random.default_rng(7)
    streams = []
    for _ in range(3):
        streams.append(
            {"sequence": engine.open(params, 5), "committed": rng.integers(3, 97, 5).tolist(), "held": 0}
        )
    for _ in range(60):
        stream = streams[rng.integers(len(streams))]
        committed = stream["committed"]
        if rng.random() < 0.1:  # the stream breaks and is opened again with the whole prefix
            engine.close_sequence(stream["sequence"])
            stream |= {"sequence": engine.open(params, 5), "held": 0}
        if rng.random() < 0.2:  # an idempotent retry may build on an older length
            stream["held"] = int(rng.integers(0, stream["held"] + 1))
        draft = rng.integers(3, 97, rng.integers(0, 6)).tolist()
        held = stream["held"]
        logits = verifier.verify(stream["sequence"], held, committed[held:], draft)
        with torch.inference_mode():
            whole = reference(input_ids=torch.tensor([committed + draft]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, whole[len(committed) - 1 :].float(), atol=1e-5, rtol=1e-5)
        verifier.service.runner.pool.check_integrity()
        num_accepted = int(rng.integers(0, len(draft) + 1))
        stream["held"] = len(committed) + num_accepted
        stream["committed"] = [*committed, *draft[:num_accepted], int(rng.integers(3, 97))]
    for stream in streams:
        engine.close_sequence(stream["sequence"])
    verifier.close()
    pool = verifier.service.runner.pool
    pool.check_integrity()
    assert pool.num_held_pages == 0


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_a_draft_proposes_the_same_after_a_rollback_as_from_scratch(tmp_path: Path, rule: Rule) -> None:
    """Rejection sampling: ids and the very probabilities, after accepts, rejects and a re-open."""
    draft = save_good_draft(tmp_path / "draft")
    config = DraftConfig(model=str(draft), dtype="float32", num_kv_tokens=4096)
    service = boot.start(config, "draft", DraftDecider(config))
    thread = LoopThread()
    params = SamplingParams(seed=11, rule=rule)

    def propose(sequence: TokenSequence, base_len: int, tokens: list[int]) -> Proposal:
        return thread.run(service.engine.run(DraftJob(sequence, base_len, tokens, num_draft_tokens=4)))

    sequence, committed, held = service.engine.open(params, 5), list(PROMPT), 0
    for num_accepted in (0, 4, 2, 4, 4, 1, 0, 3):
        proposal = propose(sequence, held, committed[held:])
        fresh = service.engine.open(params, 5)
        again = propose(fresh, 0, committed)
        service.engine.close_sequence(fresh)
        assert proposal.token_ids == again.token_ids
        for one, other in zip(proposal.supports, again.supports, strict=True):
            order, other_order = np.argsort(one.token_ids), np.argsort(other.token_ids)
            np.testing.assert_array_equal(one.token_ids[order], other.token_ids[other_order])
            np.testing.assert_allclose(one.probs[order], other.probs[other_order], atol=1e-5)
        held = len(committed) + num_accepted
        committed = [*committed, *proposal.token_ids[:num_accepted], 42]
    service.engine.close_sequence(sequence)
    service.engine.close()
    thread.close()
    service.runner.pool.check_integrity()
    assert service.runner.pool.num_held_pages == 0


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_the_draft_token_is_drawn_from_the_numbers_that_travel(tmp_path: Path, rule: Rule) -> None:
    """Over the wire's own bytes: inverting the sent distribution with the draft stream gives the token."""
    draft = save_good_draft(tmp_path / "draft")
    target = save_target(tmp_path / "target")
    opening = wire.open_sequence(SamplingParams(seed=5, rule=rule), len(PROMPT))
    opening.sequence_id = 1
    request = model_streams.draft(DraftOrder(1, 1, 0, PROMPT, 8), opened=[opening])
    with (
        local_stack(target, draft, draft_options={"max_support": 20}) as stack,
        raw_stream(stack, "draft") as stream,
    ):
        response = stream.ask(request)
    (proposal,) = proposals.split(proposals.columns_from_proto(response.proposals, 1), response.base_lens)
    numbers = uniforms(5, Purpose.DRAFT, range(len(PROMPT), len(PROMPT) + 8), len(PROMPT))
    for token_id, support, number in zip(proposal.token_ids, proposal.supports, numbers, strict=True):
        cumulative = support.probs.astype(np.float64).cumsum()
        assert len(support.token_ids) <= 20
        assert (
            support.token_ids[np.searchsorted(cumulative, number * cumulative[-1], side="right")] == token_id
        )
