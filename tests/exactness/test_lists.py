"""Several lists of Gumbel noise: emitted text follows the target's distribution, through real services.

Among other requests they are in `test_wire_distributions.py`, through processes. `tensors/test_lists.py` has
the closed forms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specwire import AsyncClient, Completion, Rule, SamplingParams
from tests.support.harness import local_stack
from tests.support.markov_distribution import PROMPT, fit_p_value
from tests.support.pairs import MARKOV_VOCAB_SIZE, markov_logits, markov_model
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.tiny_models import save

NUM_STREAMS, LENGTH = 64, 50
FEW: dict[str, Any] = {"logit_bias": {i: -100.0 for i in range(MARKOV_VOCAB_SIZE) if i not in (1, 4, 9)}}
"""Leaves three tokens, so that their order shows: three successive ones are tested together."""
CASES = [
    pytest.param(4, FEW, 2, id="joint"),
    pytest.param(2, {"temperature": 0.8, "top_p": 0.9}, 1, id="cold", marks=pytest.mark.slow),
    pytest.param(
        8,
        {"repetition_penalty": 1.6, "presence_penalty": 1.2, "max_tokens": 25},
        1,
        id="penalised",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return markov_logits(markov_model())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("markov")
    target = save(markov_model(), directory / "target")
    return target, save(markov_model(0.6, 1), directory / "draft")


@pytest.fixture(scope="module")
def address(pair: tuple[Path, Path]) -> Iterator[str]:
    with local_stack(*pair, coordinator_options={"num_draft_tokens": "3"}) as stack:
        yield stack.address


@pytest.mark.sample(1)
@pytest.mark.parametrize(("num_lists", "settings", "num_before"), CASES)
def test_several_lists(
    address: str, logits: Tensor, num_lists: int, settings: dict[str, Any], num_before: int
) -> None:
    done, params = sample(address, num_lists, settings)
    assert fit_p_value(done, logits, params, num_before) > FALSE_ALARM_RATE / len(CASES)
    rounds = sum(each.speculation.num_rounds for each in done)
    accepted = sum(each.speculation.num_accepted_tokens for each in done)
    assert 0.2 * rounds < accepted < 2.8 * rounds
    assert sum(each.speculation.num_draft_tokens for each in done) > 3 * rounds  # several chains
    assert not any(each.speculation.draft_unavailable for each in done)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [torch.minimum, pytest.param(torch.add, marks=pytest.mark.slow)])
def test_a_race_that_the_wrong_list_wins_is_caught(
    pair: tuple[Path, Path], logits: Tensor, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    """Control: the target's noise is the smallest number of the lists, or their sum."""
    monkeypatch.setattr(torch, "maximum", wrong)
    with local_stack(*pair, coordinator_options={"num_draft_tokens": "3"}) as stack:
        done, params = sample(stack.address, 8, {})
    assert fit_p_value(done, logits, params) < CLEARLY_WRONG


def sample(address: str, num_lists: int, settings: dict[str, Any]) -> tuple[list[Completion], SamplingParams]:
    """3,200 tokens, or half as many in short generations."""
    given: dict[str, Any] = {"rule": Rule.GUMBEL, "max_tokens": LENGTH, "ignore_eos": True}
    params = SamplingParams(**given | {"num_lists": num_lists} | settings)

    async def all_of_them() -> list[Completion]:
        async with AsyncClient(address) as client:
            each = (replace(params, seed=seed) for seed in range(NUM_STREAMS))
            return await asyncio.gather(*(client.generate(params=p, prompt_token_ids=PROMPT) for p in each))

    return asyncio.run(all_of_them()), params
