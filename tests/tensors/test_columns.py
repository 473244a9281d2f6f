"""A step of many kinds of sequences gives each what it gets alone; questions and answers can be pickled."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draft_service.drafter import DraftDecider, DraftJob, LeavesJob, TreeJob
from specwire.config.services import DraftConfig
from specwire.core import NO_TOKEN, Proposal, Rule, SamplingParams
from specwire.engine.cache.kv_cache import PagePool
from specwire.engine.device import Decider
from specwire.engine.drawn import Drawn
from specwire.engine.jobs import Job, TokenSequence
from specwire.errors import InternalError
from specwire.proposals.growth import Calibration, TreeGrowth
from specwire.support import Support
from verify_service.verifier import VerifyDecider, VerifyJob

VOCAB = 61
PROMPT = [3, 4, 5, 6, 5, 4]
DRAFTS = [7, 8, 9]
PARAMS = [
    SamplingParams(temperature=0, seed=1),
    SamplingParams(rule=Rule.GUMBEL, temperature=0.7, seed=2**62 + 1),
    SamplingParams(rule=Rule.REJECTION, seed=3),
    SamplingParams(rule=Rule.BLOCK, top_p=0.9, top_k=20, seed=4),
    SamplingParams(temperature=0, seed=5, logprobs=2, logit_bias={7: 5.0}),
    SamplingParams(rule=Rule.REJECTION, seed=6, repetition_penalty=1.3, min_p=0.01),
    SamplingParams(rule=Rule.GUMBEL, seed=7, presence_penalty=0.5),
]
TREE = [-1, -1, 0]


def _sequence(number: int) -> TokenSequence:
    return TokenSequence(PARAMS[number], len(PROMPT), PagePool(4, 16).new_sequence(), number)


def _committed(number: int) -> list[int]:
    """Of another length each: numbers are keyed by it."""
    return [*PROMPT, *range(number)]


def _verify(number: int) -> VerifyJob:
    params = PARAMS[number]
    supports = [Support(np.array([token, 20 + number]), np.full(2, 0.5, np.float32)) for token in DRAFTS]
    parents = TREE if number in (1, 4) else []
    committed = _committed(number)
    proposal = Proposal(len(committed), DRAFTS, [] if params.matches_tokens else supports, parents=parents)
    return VerifyJob(_sequence(number), 0, committed, proposal=proposal)


def _draft(number: int) -> DraftJob:
    limit = 50 * (number % 2)
    return DraftJob(_sequence(number), 0, _committed(number), num_draft_tokens=1, vocab_limit=limit)


def _results(decider: Decider, jobs: Sequence[Job], logits: torch.Tensor) -> list[Any]:
    for job in jobs:
        job.start()
    question = pickle.loads(pickle.dumps(decider.ask(jobs)))
    decider.apply(jobs, pickle.loads(pickle.dumps(decider.decide(question, logits))))
    return [job.result for job in jobs]


def test_verdicts() -> None:
    num_rows = len(DRAFTS) + 1
    logits = 3 * torch.randn(len(PARAMS) * num_rows, VOCAB, generator=torch.Generator().manual_seed(0))
    together = _results(VerifyDecider(), [_verify(i) for i in range(len(PARAMS))], logits)
    for i, (params, found) in enumerate(zip(PARAMS, together, strict=True)):
        [alone] = _results(VerifyDecider(), [_verify(i)], logits[i * num_rows : (i + 1) * num_rows])
        assert found.target_token_ids == alone.target_token_ids
        assert len(found.target_probs) == len(found.tail_mass) == (0 if params.matches_tokens else 3)
        np.testing.assert_allclose(found.tail_mass, alone.tail_mass, rtol=1e-6)
        for ours, theirs in zip(found.target_probs, alone.target_probs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        assert len(found.logprobs) == len(alone.logprobs) == (0 if params.logprobs is None else num_rows)


def test_only_the_sequence_with_bad_logits_fails() -> None:
    """And only if nothing can follow the committed tokens: a draft token may never be reached."""
    logits = torch.zeros(3 * 4, VOCAB)
    logits[[4, 9]] = torch.nan
    first, second, third = _results(VerifyDecider(), [_verify(i) for i in range(3)], logits)
    assert isinstance(second, InternalError)
    assert NO_TOKEN not in first.target_token_ids
    assert [token_id == NO_TOKEN for token_id in third.target_token_ids] == [False, True, False, False]


def test_drafts() -> None:
    logits = 3 * torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(1))
    decider = DraftDecider(DraftConfig(max_support=5))
    together = _results(decider, [_draft(i) for i in range(len(PARAMS))], logits)
    for i, found in enumerate(together):
        [alone] = _results(decider, [_draft(i)], logits[i : i + 1])
        assert found.token_ids == alone.token_ids
        assert len(found.supports) == len(alone.supports) == (not PARAMS[i].matches_tokens)
        for ours, theirs in zip(found.supports, alone.supports, strict=True):
            np.testing.assert_allclose(ours.probs, theirs.probs, rtol=1e-6)
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_what_follows_a_leaf_is_drawn_after_its_own_path() -> None:
    """Nodes of other paths lie in the sequence between the committed tokens and the leaf."""
    sequence, growth = _sequence(6), TreeGrowth(4, 2, Calibration())
    tree = TreeJob(sequence, 0, PROMPT, num_draft_tokens=4, num_candidates=2, growth=growth)
    tree.start()
    tree.add(Drawn([9], ranked=[[9, 8]], shares=[[0.6, 0.4]]), 0)
    tree.add(Drawn([20, 22], ranked=[[20, 21], [22, 23]], shares=[[0.5, 0.4]] * 2), 0)
    assert isinstance(tree.result, Proposal)
    leaf = growth.token_ids.index(20)
    job = LeavesJob(sequence, tree.committed_len, [], num_candidates=2, growth=growth, leaves=[leaf])
    job.start()
    assert sequence.tokens == [*PROMPT, 9, 8, 20]
    assert (job.positions(), job.histories()) == ([len(PROMPT) + 2], [[*PROMPT, 9, 20]])
