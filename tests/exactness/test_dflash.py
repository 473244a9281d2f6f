"""A target with a block drafter: the text of plain decoding, and the distribution under every rule.

Over real services. The drafter has random weights: it is right as often as chance has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specwire import AsyncClient, Completion, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.services import UpConfig
from tests.support.blocks import save_block_drafter
from tests.support.harness import LocalStack, local_stack
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.pairs import MARKOV_VOCAB_SIZE, markov_logits, markov_model, save_target
from tests.support.statistics import FALSE_ALARM_RATE
from tests.support.tiny_models import save

DFLASH = '{"method": "dflash"}'
GUMBEL = SamplingParams(max_tokens=48, seed=7, rule=Rule.GUMBEL, ignore_eos=True)
KINDS = [
    pytest.param(replace(GUMBEL, temperature=0), id="greedy"),
    pytest.param(replace(GUMBEL, temperature=0.4), id="gumbel"),
    pytest.param(
        replace(GUMBEL, temperature=0.4, logprobs=2, presence_penalty=1.0, logit_bias={5: 1.0}, top_p=0.9),
        id="every parameter",
    ),
]
SHAPES: list[dict[str, int]] = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 12},
    {"num_draft_tokens": 16, "max_depth": 3},
    {"num_draft_tokens": 63, "max_depth": 8},
]


@pytest.fixture(scope="module", params=[True, False], ids=["goes on", "waits"])
def stack(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory: Path = tmp_path_factory.mktemp("dflash")
    target, drafter = save_target(directory / "target"), save_block_drafter(directory / "drafter")
    options = {"speculative_config": DFLASH, "verify_ahead": request.param, "num_draft_tokens": "auto"}
    with local_stack(target, coordinator_options=options, verify_options={"dflash": str(drafter)}) as running:
        yield running


@pytest.mark.parametrize("params", KINDS)
def test_the_text_is_that_of_plain_decoding(stack: LocalStack, params: SamplingParams) -> None:
    """With every shape that may be asked for, in one stream and in several; some drafts are right."""
    client, prompt = stack.client, [5, 9, 11, 2, 7, 4]
    plain = client.generate(params=replace(params, draft="off"), prompt_token_ids=prompt)
    assert not plain.speculation.by_source
    num_accepted = 0
    for shape in SHAPES:
        done = client.generate(params=replace(params, **shape), prompt_token_ids=prompt)  # type: ignore[arg-type]
        assert done.token_ids == plain.token_ids
        sources = [each.source for each in done.speculation.by_source]
        assert sources == ["dflash"] or not (sources or shape), "what is chosen may be plain rounds"
        num_accepted += done.speculation.num_accepted_tokens
    assert num_accepted
    together = asyncio.run(_together(stack.address, params, prompt, 6))
    assert {done.token_ids for done in together} == {plain.token_ids}
    stack.assert_idle_within(2.0)


async def _together(address: str, params: SamplingParams, prompt: list[int], num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(
            *(client.generate(params=params, prompt_token_ids=prompt) for _ in range(num))
        )


# --- distributions ------------------------------------------------------------------------------------

NUM_STREAMS, NUM_TOKENS = 64, 50
FEW = {i: -100.0 for i in range(MARKOV_VOCAB_SIZE) if i not in (1, 4, 9)}
"""Biases that leave three tokens, so that three successive ones are tested for their joint distribution."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of two processes, started as `specwire up --draft dflash:DIR` does."""
    directory: Path = tmp_path_factory.mktemp("markov")
    target = save(markov_model(), directory / "target")
    mask = {"mask_token_id": 0, "target_layer_ids": [0], "max_position_embeddings": 4096}
    drafter = save_block_drafter(directory / "drafter", **mask)
    config = UpConfig(
        target=str(target),
        draft=f"dflash:{drafter}",
        dtype="float32",
        address="127.0.0.1:0",
        num_draft_tokens="3",
        num_threads=1,
    )
    with Stack(config) as stack:
        yield stack.address


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(address: str, rule: Rule) -> None:
    params, logits = SamplingParams(max_tokens=NUM_TOKENS, rule=rule), markov_logits(markov_model())
    completions = asyncio.run(_sample(address, params, NUM_STREAMS))
    assert sum(done.speculation.num_draft_tokens for done in completions) > NUM_STREAMS * NUM_TOKENS / 4
    assert fit_p_value(completions, logits, params) > FALSE_ALARM_RATE
    few = replace(params, logit_bias=FEW)
    joint = asyncio.run(_sample(address, few, NUM_STREAMS // 2))
    assert fit_p_value(joint, logits, few, num_before=2) > FALSE_ALARM_RATE


async def _sample(address: str, params: SamplingParams, num: int) -> list[Completion]:
    async with AsyncClient(address) as client:
        each = [replace(params, seed=seed) for seed in range(num)]
        return await asyncio.gather(*(client.generate(params=p, prompt_token_ids=PROMPT) for p in each))
