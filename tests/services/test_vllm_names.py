"""Metrics under vLLM's names: a dashboard that was built for vLLM reads them."""

from __future__ import annotations

import re

from coordinator.metrics import TABLE as COORDINATOR
from specwire import Rule, SamplingParams
from specwire.engine.metrics import TABLE as ENGINE
from specwire.telemetry.vllm_names import EQUIVALENTS
from tests.services.test_metrics import DOCS, DRAFT, PROMPT, TARGET, announced, samples
from tests.support.harness import LOOPBACK, local_stack


def test_each_name_stands_for_a_metric_and_for_one_only() -> None:
    ours = {metric.name: metric for table in (COORDINATOR, ENGINE) for metric in table}
    assert {each.ours for each in EQUIVALENTS} <= set(ours)
    for table in (COORDINATOR, ENGINE):
        shown = [each.theirs for each in EQUIVALENTS for metric in table if each.ours == metric.name]
        assert len(set(shown)) == len(shown)
    for each in EQUIVALENTS:
        assert each.theirs.endswith("_total") == each.ours.endswith("_total")
        assert each.theirs.endswith("_seconds") == each.ours.endswith("_seconds")


def test_the_page_has_the_same_names() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(vllm:\w+)` \|$", (DOCS / "metrics.md").read_text(), re.M)
    assert rows == [(each.ours, each.theirs) for each in EQUIVALENTS]


def test_a_stack_under_vllms_names() -> None:
    options = {"metrics_address": LOOPBACK, "metrics_names": "vllm"}
    with (
        announced() as addresses,
        local_stack(
            TARGET, DRAFT, coordinator_options=options, verify_options=options, draft_options=options
        ) as stack,
    ):
        params = SamplingParams(max_tokens=24, seed=1, rule=Rule.GUMBEL)
        done = [stack.client.generate(params=params, prompt_token_ids=PROMPT) for _ in range(2)]
        while True:  # a client has its last message before the request is counted, and closed at verify
            verify, _, coordinator = (samples(address) for address in addresses)
            is_counted = any(s.name == "vllm:request_success_total" and s.value == 2 for s in coordinator)
            if is_counted and not any(s.name == "vllm:kv_cache_usage_perc" and s.value for s in verify):
                break
    found = {(s.name, *sorted(s.labels.items() - {("model_name", TARGET), ("engine", "0")})): s.value
             for s in (*coordinator, *verify)}  # fmt: skip
    shown = {s.name for s in (*coordinator, *verify)}
    for each in EQUIVALENTS:
        assert shown & {each.theirs, f"{each.theirs}_bucket"}, each.theirs
        assert not shown & {each.ours, f"{each.ours}_bucket"}, each.ours
    assert found["vllm:request_success_total", ("finished_reason", "length")] == 2
    reasons = {values[0][1] for name, *values in found if name == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}
    assert found["vllm:prefix_cache_queries_total",] == found["vllm:prompt_tokens_total",] == 2 * len(PROMPT)
    assert 0 < found["vllm:prefix_cache_hits_total",] == sum(each.usage.cached_tokens for each in done)
    assert found["vllm:e2e_request_latency_seconds_count",] == 2
    assert found["vllm:kv_cache_usage_perc", ("role", "verify")] == 0, "nothing runs"
    accepted = sum(each.speculation.num_accepted_tokens for each in done)
    assert found["vllm:spec_decode_num_accepted_tokens_total",] == accepted
    assert found["specwire_rounds_total",] > 0, "what vLLM does not have keeps its name"
