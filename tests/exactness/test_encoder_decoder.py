"""The distribution of an encoder-decoder's output, over real services: that of the target, given its input.

All sequences of three tokens over a vocabulary of five are enumerated with transformers' own model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import coordinator.generation
from specwire import Completion, Rule, SamplingParams
from tests.support import encoder_decoders
from tests.support.encoder_decoders import START, own_logits
from tests.support.harness import LocalStack, local_stack
from tests.support.own_drafts import typical
from tests.support.statistics import CLEARLY_WRONG, FALSE_ALARM_RATE, chi_square_p_value
from tests.support.together import sampled

VOCAB_SIZE, LENGTH, NUM_SAMPLES = 5, 3, 250
INPUTS = ([3, 1, 4, 4, 2], [4, 2, 1])
SAMPLED = SamplingParams(max_tokens=LENGTH, num_draft_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return encoder_decoders.build("t5_gated", 3, vocab_size=VOCAB_SIZE)


@torch.inference_mode()
def distribution(model: Any, encoder_input: list[int]) -> np.ndarray:
    """float64 [VOCAB_SIZE ** LENGTH], of all sequences in lexical order."""
    found = []
    for tokens in product(range(VOCAB_SIZE), repeat=LENGTH):
        logits = own_logits(model, encoder_input, [START, *tokens[:-1]]).double()
        found.append(float(logits.softmax(-1)[range(LENGTH), list(tokens)].prod()))
    return np.array(found)


def counts(completions: list[Completion]) -> np.ndarray:
    found = np.zeros(VOCAB_SIZE**LENGTH)
    for done in completions:
        found[int(np.ravel_multi_index(done.token_ids, (VOCAB_SIZE,) * LENGTH))] += 1
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory: Path = tmp_path_factory.mktemp("pair")
    target = encoder_decoders.save(directory / "target", "t5_gated", 3, vocab_size=VOCAB_SIZE)
    draft = encoder_decoders.save(directory / "draft", "t5_gated", 3, vocab_size=VOCAB_SIZE, noise=0.3)
    with local_stack(target, draft) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK, Rule.GUMBEL])
def test_the_distribution_is_the_targets(stack: LocalStack, model: Any, rule: Rule) -> None:
    """Given its own input; and of another input it is clearly another one, so the test can fail."""
    own, other = INPUTS
    completions = sampled(stack.address, replace(SAMPLED, rule=rule), range(NUM_SAMPLES), own)
    share = np.mean([done.speculation.draft_acceptance_rate for done in completions])
    assert 0.2 < share < 0.9
    found = counts(completions)
    assert chi_square_p_value(found, distribution(model, own)) > FALSE_ALARM_RATE
    assert chi_square_p_value(found, distribution(model, other)) < CLEARLY_WRONG


@pytest.mark.slow
def test_control_a_rule_that_is_not_exact_is_caught(
    stack: LocalStack, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.generation, "acceptance", SimpleNamespace(accept=typical))
    params = replace(SAMPLED, rule=Rule.REJECTION)
    found = counts(sampled(stack.address, params, range(NUM_SAMPLES), INPUTS[0]))
    assert chi_square_p_value(found, distribution(model, INPUTS[0])) < CLEARLY_WRONG
