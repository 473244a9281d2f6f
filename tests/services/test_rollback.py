"""Rollback on both services, driven message by message over real streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draft_service.drafter import DraftDecider, DraftJob
from specwire import Rule, SamplingParams
from specwire.config.services import DraftConfig
from specwire.core import Proposal
from specwire.engine import boot
from specwire.engine.jobs import TokenSequence
from tests.support import tiny_models
from tests.support.harness import LoopThread, local_stack
from tests.support.pairs import save_good_draft, save_target

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
