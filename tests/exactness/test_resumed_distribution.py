"""Generations that one coordinator after another goes on with follow the target's distribution."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specwire import Rule, SamplingParams
from specwire.completion import Completion
from specwire.rpc.wire import client as client_wire
from tests.support.harness import local_stack
from tests.support.markov_distribution import fit_p_value
from tests.support.pairs import markov_logits, markov_model
from tests.support.raw_streams import Wire
from tests.support.statistics import FALSE_ALARM_RATE
from tests.support.tiny_models import save


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_resuming_does_not_change_the_distribution(tmp_path: Path, rule: Rule) -> None:
    """Rejection sampling, each generation cut four times: the tokens follow the target's distribution.

    As `test_wire_distributions`: with random seeds, it would fail on right code with probability 1e-6.
    """
    target, draft = save(markov_model(), tmp_path / "t"), save(markov_model(scale=-1.0), tmp_path / "d")
    params = [SamplingParams(max_tokens=100, rule=rule, seed=i, num_draft_tokens=2) for i in range(24)]

    async def sample(address: str) -> list[Completion]:
        requests = [client_wire.generate_request(None, each, [3]) for each in params]
        async with Wire(address) as wires:
            return await asyncio.gather(*(wires.generate(request, 1, 7, 2, 12) for request in requests))

    with local_stack(target, draft) as stack:
        completions = asyncio.run(sample(stack.address))
    assert [len(done.token_ids) for done in completions] == [100] * len(params)
    p_value = fit_p_value(completions, markov_logits(markov_model()), SamplingParams(max_tokens=100))
    assert p_value > FALSE_ALARM_RATE
