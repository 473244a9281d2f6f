"""The chosen number of draft tokens in the running system; `test_draft_length.py` has how it is chosen."""

from __future__ import annotations

import numpy as np

from specwire import Rule, SamplingParams
from tests.harness import local_stack


def test_the_running_system_finds_a_good_number() -> None:
    """Emulated devices, over real gRPC: near the best fixed number, and far above plain decoding."""
    with local_stack("emulated:step_ms=30", "emulated:step_ms=2,alpha=0.8") as stack:

        def tokens_per_s(num_draft_tokens: int | None, seed: int) -> float:
            params = SamplingParams(
                max_tokens=90, seed=seed, rule=Rule.GUMBEL, num_draft_tokens=num_draft_tokens
            )
            done = stack.client.generate(params=params, prompt_token_ids=[1])
            return 90e3 / done.timing.total_ms

        for seed in range(3):
            tokens_per_s(None, seed)  # with the first trials
        runs = [
            (tokens_per_s(6, seed), tokens_per_s(None, seed), tokens_per_s(0, seed)) for seed in (10, 11, 12)
        ]
    best, chosen, plain = np.array(runs).T
    assert np.median(chosen / best) > 0.8
    assert np.median(chosen / plain) > 1.5
