"""A draft that is late is waited for up to a bound; on a slow link what is asked for goes first.

A draft that hangs: `test_hung_device`.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from specwire import Rule, SamplingParams
from specwire.config.link import Link
from tests.support.harness import LocalStack, local_stack

pytestmark = pytest.mark.serial

PROMPT = [1, 2, 3]
TARGET_MS = 10.0
TARGET, DRAFT = f"emulated:step_ms={TARGET_MS:g}", "emulated:step_ms=1,alpha=0.9,runner_up=0.55"


def gaps_ms(stack: LocalStack, params: SamplingParams, *, stall_at: int, resume_at: int) -> list[float]:
    """Times between those chunks that came while the way to the draft was blocked."""
    proxy = stack.draft_proxy
    assert proxy is not None
    gaps, num_tokens, last_s = [], 0, time.perf_counter()
    with stack.client.stream(params=params, prompt_token_ids=PROMPT) as stream:
        for chunk in stream:
            now_s = time.perf_counter()
            before, num_tokens = num_tokens, num_tokens + len(chunk.tokens)
            if stall_at <= before < resume_at:
                gaps.append((now_s - last_s) * 1e3)
            if before < stall_at <= num_tokens:
                proxy.stall()
            if before < resume_at <= num_tokens:
                proxy.resume()
            last_s = now_s
    return gaps


@pytest.mark.sample(1)
@pytest.mark.parametrize("max_depth", [0, 3], ids=["chains", "trees"])
def test_a_fixed_length_waits_until_the_timeout_and_no_longer(max_depth: int) -> None:
    """A request with a fixed length gets the same text again, however late the draft is."""
    options = {"num_draft_tokens": "4", "num_outcomes": "0", "draft_timeout_ms": 1000.0}
    params = SamplingParams(max_tokens=200, seed=1, max_depth=max_depth)
    with local_stack(TARGET, DRAFT, coordinator_options=options, draft_link=Link(rtt_ms=2)) as stack:
        gaps = gaps_ms(stack, params, stall_at=50, resume_at=180)
    assert 1000 <= max(gaps) < 3000
    assert sorted(gaps)[-2] < 900


@pytest.mark.slow
@pytest.mark.parametrize("is_of_draft", [True, False], ids=["draft", "verify"])
def test_pushes_leave_a_slow_link_to_what_is_asked_for(is_of_draft: bool) -> None:
    """2 Mbit/s, 8 streams, 32 outcomes of 2 KiB: far more than the link carries between two passes.

    Without a bound on what is under way, the draft was lost in every request, and rounds waited for seconds
    behind proposals ahead.
    """
    target, draft = "emulated:step_ms=30", "emulated:step_ms=2,alpha=0.8,runner_up=0.55"
    link = Link(rtt_ms=10, bandwidth_mbps=2)
    params = [SamplingParams(max_tokens=40, seed=seed, rule=Rule.REJECTION) for seed in range(8)]
    spent_s = {}
    for num_outcomes in ("0", "32"):
        with (
            local_stack(
                target,
                draft,
                coordinator_options={"num_outcomes": num_outcomes},
                draft_link=link if is_of_draft else None,
                verify_link=None if is_of_draft else link,
            ) as stack,
            ThreadPoolExecutor(len(params)) as clients,
        ):
            generate = partial(stack.client.generate, prompt_token_ids=PROMPT)
            started_s = time.perf_counter()
            done = list(clients.map(lambda each, generate=generate: generate(params=each), params))
            spent_s[num_outcomes] = time.perf_counter() - started_s
        assert [each.speculation.draft_unavailable for each in done] == [""] * len(done)
        assert min(each.speculation.mean_acceptance_length for each in done) > 2
    assert spent_s["32"] < 4 * spent_s["0"], spent_s
