"""Several chains in a round: emitted text follows the target's distribution, through real processes.

As `test_wire_distributions.py`. The draft is often right and often not, and half of the vocabulary is
outside of its supports: accepted, recovered, tail and bonus tokens all come often. `unit/test_kseq.py` has
the proof by enumeration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import draft_service.drafter
from specwire import Completion, Rule, SamplingParams
from specwire.rule import kseq, random
from tests.support.harness import float32_processes, local_stack
from tests.support.markov_distribution import FEW, PROMPT, fit_p_value
from tests.support.pairs import save_markov_pair
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE
from tests.support.together import sampled

NUM_STREAMS, LENGTH = 64, 50
CASES = [
    pytest.param({}, 1, id="plain"),
    pytest.param({"temperature": 0.8, "top_p": 0.9, "logit_bias": {2: 1.5, 7: -2.0}}, 1, id="cold"),
    pytest.param(
        {"repetition_penalty": 1.6, "presence_penalty": 1.2, "frequency_penalty": 0.7, "max_tokens": 25},
        1,
        id="penalised",
    ),
    pytest.param({"logit_bias": FEW}, 2, id="joint"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_markov_pair(tmp_path_factory.mktemp("markov"), 0.6, 1)


def config(num_chains: int) -> str:
    return json.dumps({"method": "draft_model", "selection": "kseq", "num_chains": num_chains})


@pytest.fixture(scope="module")
def address(pair: tuple[Path, Path]) -> Iterator[str]:
    """Of real processes, with four chains a round."""
    with float32_processes(*pair, num_draft_tokens="3", speculative_config=config(4)) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "num_before"), CASES)
def test_four_chains(address: str, logits: Tensor, settings: dict[str, Any], num_before: int) -> None:
    check_distribution(address, logits, settings, num_before)


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [2, 8])
def test_chains_with_tails(pair: tuple[Path, Path], logits: Tensor, num_chains: int) -> None:
    """The draft's distribution is cut to eight tokens before it is drawn from."""
    with serving(pair, num_chains) as stack:
        check_distribution(stack.address, logits, {"temperature": 0.9}, 1)


@pytest.mark.slow
def test_a_factor_that_is_too_small_is_caught(
    pair: tuple[Path, Path], logits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: each chain is judged as if it were alone (ρ = 1)."""
    monkeypatch.setattr(kseq, "find_rho", lambda *_: 1.0)
    with serving(pair, 4) as stack:
        done, params = sample(stack.address, {})
    assert fit_p_value(done, logits, params) < CLEARLY_WRONG


@pytest.mark.slow
def test_chains_that_are_not_independent_are_caught(
    pair: tuple[Path, Path], logits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: all chains are drawn with the numbers of the first."""

    def of_the_first(*args: Any) -> np.ndarray:
        return random.uniforms(*args[:4])

    monkeypatch.setattr(draft_service.drafter, "uniforms", of_the_first)
    with serving(pair, 4) as stack:
        done, params = sample(stack.address, {})
    assert fit_p_value(done, logits, params) < CLEARLY_WRONG


def serving(pair: tuple[Path, Path], num_chains: int) -> Any:
    """Services in this process."""
    given = {"num_draft_tokens": "3", "speculative_config": config(num_chains)}
    return local_stack(*pair, coordinator_options=given, draft_options={"max_support": 8})


def check_distribution(address: str, logits: Tensor, settings: dict[str, Any], num_before: int) -> None:
    done, params = sample(address, settings)
    assert fit_p_value(done, logits, params, num_before) > FALSE_ALARM_RATE / len(CASES)
    rounds = sum(each.speculation.num_rounds for each in done)
    accepted = sum(each.speculation.num_accepted_tokens for each in done)
    assert 0.2 * rounds < accepted < 2.8 * rounds
    assert not any(each.speculation.draft_unavailable for each in done)


def sample(address: str, settings: dict[str, Any]) -> tuple[list[Completion], SamplingParams]:
    """3,200 tokens, or half as many in short generations."""
    given: dict[str, Any] = {"rule": Rule.KSEQ, "max_tokens": LENGTH, "ignore_eos": True}
    params = SamplingParams(**given | settings)

    return sampled(address, params, range(NUM_STREAMS), PROMPT), params
