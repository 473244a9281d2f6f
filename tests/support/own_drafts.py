"""What every target that drafts for itself must pass: text, distribution, and a control with a wrong rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import coordinator.generation
import verify_service.verifier
from specwire import Completion, Rule, SamplingParams
from specwire.core import Outcome, Proposal, Verdict
from specwire.rule import acceptance
from tests.support.blocks import save_block_drafter
from tests.support.eagle3 import save_eagle3
from tests.support.harness import LocalStack
from tests.support.heads import save_heads
from tests.support.markov_distribution import FEW, PROMPT, fit_p_value
from tests.support.mtp import save_mtp_target
from tests.support.pairs import save_good_draft, save_target
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.together import generated, sampled

NUM_STREAMS, NUM_TOKENS = 64, 50
TEXT_PROMPT = [5, 9, 11, 2, 7, 4]
SLOW = partial(pytest.param, marks=pytest.mark.slow)


def kinds(max_tokens: int) -> list[Any]:
    """Requests whose text is fixed, for `parametrize`; all but the last one are slow."""
    given = SamplingParams(max_tokens=max_tokens, seed=7, rule=Rule.GUMBEL, ignore_eos=True)
    warm = replace(given, temperature=0.4)
    every = replace(warm, logprobs=2, presence_penalty=1.0, logit_bias={5: 1.0}, top_p=0.9)
    return [
        SLOW(replace(given, temperature=0), id="greedy"),
        SLOW(warm, id="gumbel"),
        pytest.param(every, id="every parameter"),
    ]


def check_text(
    stack: LocalStack, params: SamplingParams, source: str, shapes: Sequence[Mapping[str, int]]
) -> list[Completion]:
    """The text is that of plain decoding: with every shape that is asked for, in one stream and in six.

    Args:
        shapes: what requests fix of their proposals; an empty one leaves it to the coordinator.

    Returns:
        Those of one stream.
    """
    plain = stack.client.generate(params=replace(params, draft="off"), prompt_token_ids=TEXT_PROMPT)
    assert not plain.speculation.by_source
    found = []
    for shape in shapes:
        done = stack.client.generate(params=replace(params, **shape), prompt_token_ids=TEXT_PROMPT)  # type: ignore[arg-type]
        assert done.token_ids == plain.token_ids
        sources = [each.source for each in done.speculation.by_source]
        assert sources == [source] or not (sources or shape), "what is chosen may be plain rounds"
        found.append(done)
    fixed = replace(params, **shapes[-1])  # type: ignore[arg-type]
    together = generated(stack.address, [params, params, params, fixed, fixed, fixed], TEXT_PROMPT)
    assert {done.token_ids for done in together} == {plain.token_ids}
    stack.assert_idle_within(2.0)
    return found


def check_distribution(address: str, logits: torch.Tensor, rule: Rule) -> None:
    """Pairs of tokens have the target's distribution, and triples where few tokens are left.

    Args:
        logits: [vocab_size, vocab_size] after each token.
    """
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=rule)
    completions = sampled(address, params, range(NUM_STREAMS), PROMPT)
    assert sum(done.speculation.num_draft_tokens for done in completions) > NUM_STREAMS * NUM_TOKENS / 4
    assert fit_p_value(completions, logits, params) > FALSE_ALARM_RATE
    few = replace(params, logit_bias=FEW)
    joint = sampled(address, few, range(NUM_STREAMS // 2), PROMPT)
    assert fit_p_value(joint, logits, few, num_before=2) > FALSE_ALARM_RATE


def num_passes(address: str, num_draft_tokens: int) -> int:
    """For 60 tokens of greedy decoding."""
    params = SamplingParams(max_tokens=60, seed=0, temperature=0, num_draft_tokens=num_draft_tokens)
    return generated(address, [params], PROMPT)[0].speculation.num_rounds


def typical(proposal: Proposal, verdict: Verdict, params: SamplingParams, seed: int) -> Outcome:
    """Takes draft tokens that are likely enough, as Medusa's typical acceptance (arXiv 2401.10774, 2.3.1)."""
    if proposal.token_ids and all(probs[0] > 0.09 for probs in verdict.target_probs):
        return Outcome(range(len(proposal.token_ids)), verdict.target_token_ids[-1])
    return acceptance.accept(proposal, verdict, params, seed)


def check_control(stack: LocalStack, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same services fit the distribution with the right rule, and do not with one that is not exact."""
    params = SamplingParams(max_tokens=NUM_TOKENS, rule=Rule.REJECTION)
    check_distribution(stack.address, logits, Rule.REJECTION)
    for module in (coordinator.generation, verify_service.verifier):
        monkeypatch.setattr(module, "acceptance", SimpleNamespace(accept=typical))
    wrong = sampled(stack.address, params, range(NUM_STREAMS), PROMPT)
    assert fit_p_value(wrong, logits, params) < CLEARLY_WRONG


def save_drafting(source: str, directory: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and the options by which it drafts for itself."""
    if source == "mtp":
        return save_mtp_target(directory / "target", "glm4_moe"), {"mtp": True}
    target = save_target(directory / "target")
    match source:
        case "heads":
            value = str(save_heads(directory / "heads", target))
        case "layers":
            value = "m1"
        case "dflash":
            value = str(save_block_drafter(directory / "drafter"))
        case "eagle3":
            value = str(save_eagle3(directory / "eagle3"))
        case _:
            value = str(save_good_draft(directory / "draft"))
    return target, {source: value}
