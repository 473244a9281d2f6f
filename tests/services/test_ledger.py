"""The ledger of a generation: in every scenario its stages add up to the wall time, and the one to
blame is the largest.

The wall time is that of the span `generate`, which lasts from the arrival of the request to its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specwire import Completion, DeadlineExceededError, Rule, SamplingParams
from specwire.completion import Stage
from specwire.config.link import Link
from specwire.errors import InvalidRequestError
from specwire.telemetry.semantics import stage_attribute
from tests.support.harness import LocalStack, local_stack
from tests.support.otlp_receiver import OtlpReceiver
from tools.timeline.spans import RecordedSpan

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("no_collector")]

TARGET = "emulated:step_ms=8,token_us=100"
DRAFT = "emulated:step_ms=2,alpha=0.8"
PROMPT = [7, 8, 9] * 4
TOLERANCE_MS = 1.0


@contextlib.contextmanager
def traced(
    target: str = TARGET, draft: str | None = DRAFT, **options: Any
) -> Iterator[tuple[LocalStack, OtlpReceiver]]:
    with OtlpReceiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with local_stack(target, draft, **options) as stack:
            yield stack, receiver


def roots(receiver: OtlpReceiver, count: int) -> list[RecordedSpan]:
    def generates(spans: list[RecordedSpan]) -> list[RecordedSpan]:
        return [span for span in spans if span.name == "generate"]

    return generates(receiver.wait_for(lambda spans: len(generates(spans)) >= count))


def stages(root: RecordedSpan) -> dict[Stage, float]:
    """Checked: they add up to the span."""
    found = {stage: float(str(root.attributes.get(stage_attribute(stage), 0.0))) for stage in Stage}
    assert sum(found.values()) == pytest.approx(root.duration_ns / 1e6, abs=TOLERANCE_MS), found
    assert min(found.values()) >= 0
    return found


def check_completion(done: Completion) -> None:
    timing = done.timing
    assert sum(timing.stages.values()) == pytest.approx(timing.total_ms, abs=1e-3)
    assert 0 < timing.time_to_first_token_ms <= timing.total_ms


def to_blame(found: dict[Stage, float]) -> Stage:
    return max(found, key=lambda stage: found[stage])


def generate(stack: LocalStack, **settings: Any) -> Completion:
    settings = {"max_tokens": 40, "seed": 3, "rule": Rule.GUMBEL, **settings}
    return stack.client.generate(params=SamplingParams(**settings), prompt_token_ids=PROMPT)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 4, "temperature": 0.0},
        {"num_draft_tokens": 4, "rule": Rule.REJECTION},
        {"num_draft_tokens": 4},
    ],
    ids=["plain", "greedy", "rejection", "gumbel"],
)
def test_stages_add_up_behind_a_proxy(settings: dict[str, Any]) -> None:
    """20 ms there and back to the draft; with prepared outcomes, what was drafted ahead is in no stage.

    A hiccup of the machine is network time as well, since nobody else accounts for it: the bound from above
    holds for the best of three generations.
    """
    options = {"num_outcomes": "16"}
    with traced(draft_link=Link(rtt_ms=20), coordinator_options=options) as (stack, receiver):
        done = [generate(stack, **settings) for _ in range(3)]
        found = [stages(root) for root in roots(receiver, len(done))]
    excess_ms = []
    for completion, spent in zip(done, found, strict=True):
        check_completion(completion)
        num_rounds = completion.speculation.num_rounds
        # Passes of 8 ms; the first has the prompt as well. A plain one begins before it is asked for, while a
        # slow machine still emits the one before.
        assert spent[Stage.VERIFY] > (8 if settings["num_draft_tokens"] else 5) * num_rounds
        if not settings["num_draft_tokens"]:
            assert spent[Stage.DRAFT] + spent[Stage.DRAFT_QUEUE] + spent[Stage.DRAFT_NETWORK] < TOLERANCE_MS
            continue
        assert spent[Stage.DRAFT_NETWORK] >= 20  # of the first round, which nothing was prepared for
        num_missed = num_rounds - completion.speculation.num_prepared
        overhead_ms = spent[Stage.VERIFY_NETWORK] / num_rounds  # of a neighbour: gRPC and a busy event loop
        excess_ms.append(spent[Stage.DRAFT_NETWORK] - num_missed * (20 + 8 + 4 * overhead_ms))
    assert not excess_ms or min(excess_ms) <= 0
    num_prepared = [completion.speculation.num_prepared for completion in done]
    if any(num_prepared):
        prepared = {span.span_id for span in receiver.spans if span.name == "draft.prepare"}
        linked = [span for span in receiver.spans if span.name == "round" and span.links]
        assert len(linked) >= sum(num_prepared)
        assert {link.span_id for span in linked for link in span.links} <= prepared
        ahead_ms = [completion.timing.ahead_ms for completion in done]
        assert all(ahead >= 2 * count for ahead, count in zip(ahead_ms, num_prepared, strict=True))


def test_what_was_drafted_ahead_is_not_network() -> None:
    """Neighbours, a draft slower than the target: most proposals are begun when they are asked for."""
    options = {"num_outcomes": "8"}
    draft = "emulated:step_ms=4,alpha=0.9"
    with traced("emulated:step_ms=4", draft, coordinator_options=options) as (stack, receiver):
        done = generate(stack, num_draft_tokens=4, max_tokens=64)
        [root] = roots(receiver, 1)
    found = stages(root)
    assert done.timing.ahead_ms > 0
    assert found[Stage.DRAFT] > 1.5 * found[Stage.DRAFT_NETWORK], found  # else it is the smaller one


def test_a_verdict_that_did_not_wait_for_its_request_is_not_awaited() -> None:
    """Its service's span comes after the one around the call: the target goes on by itself, 10 ms away."""
    with traced(draft=None, verify_link=Link(rtt_ms=20)) as (stack, receiver):
        done = generate(stack, num_draft_tokens=0, max_tokens=64)
        roots(receiver, 1)
    calls = {span.span_id: span for span in receiver.spans if span.name == "verify"}
    served = [(span, calls[span.parent_id]) for span in receiver.spans if span.name == "verify.serve"]
    assert done.speculation.num_rounds - 1 <= len(served) <= len(calls)  # the last one may be closed by then
    awaited = [call.attributes["specwire.awaited"] is True for _, call in served]
    assert sum(awaited) < len(calls) / 2
    assert all(
        serve.end_ns < call.end_ns for (serve, call), is_so in zip(served, awaited, strict=True) if is_so
    )


def test_eight_streams_at_once_wait_for_each_other() -> None:
    """One prompt fills a pass, so the last of eight waits for six or seven passes."""
    with (
        traced("emulated:step_ms=60", None, verify_options={"max_num_tokens": 65}) as (stack, receiver),
        ThreadPoolExecutor(8) as pool,
    ):
        prompts = [[5 + i, 6, 7, 8] * 16 for i in range(8)]
        params = SamplingParams(max_tokens=1, seed=3)
        for done in pool.map(lambda ids: stack.client.generate(params=params, prompt_token_ids=ids), prompts):
            check_completion(done)
        found = [stages(root) for root in roots(receiver, 8)]
    total = {stage: sum(each[stage] for each in found) for stage in Stage}
    assert to_blame(total) is Stage.VERIFY_QUEUE, total


def test_eight_streams_on_two_places() -> None:
    with traced(coordinator_options={"max_running": 2}) as (stack, receiver):
        with ThreadPoolExecutor(8) as pool:
            wall_ms = []

            def timed(seed: int) -> Completion:
                started = time.perf_counter()
                done = generate(stack, seed=seed)
                wall_ms.append((time.perf_counter() - started) * 1e3)
                return done

            completions = list(pool.map(timed, range(8)))
        found = [stages(root) for root in roots(receiver, 8)]
    blamed = [to_blame(each) for each in found]
    assert blamed.count(Stage.ADMISSION) >= 4, found
    for done in completions:
        check_completion(done)
    slowest = max(completions, key=lambda done: done.timing.total_ms)
    assert slowest.timing.time_to_first_token_ms > slowest.timing.admission_ms > max(wall_ms) / 2


def test_a_long_prompt_beside_four_streams() -> None:
    """It runs in one pass, and the streams that were asked for meanwhile wait in the verify service."""
    options: dict[str, Any] = {"verify_options": {"max_prefill_tokens": 2048, "max_num_tokens": 2048}}
    options["coordinator_options"] = {"verify_ahead": False}  # else they are in that pass
    with (
        traced("emulated:step_ms=5,token_us=600", None, **options) as (stack, receiver),
        ThreadPoolExecutor(5) as pool,
    ):
        params = SamplingParams(max_tokens=2, seed=9)
        long = pool.submit(stack.client.generate, params=params, prompt_token_ids=[5, 6, 7] * 500)
        while not stack.status("verify").num_sequences:  # its pass takes 900 ms
            assert not long.done()
        streams = [pool.submit(generate, stack, seed=seed, max_tokens=24) for seed in range(4)]
        others = [each.result() for each in streams]
        check_completion(long.result())
        assert len([stages(root) for root in roots(receiver, 5)]) == 5
    worst = max(others, key=lambda done: done.timing.verify_queue_ms).timing
    assert to_blame(worst.stages) is Stage.VERIFY_QUEUE, worst


def test_a_slow_reader_is_to_blame() -> None:
    with traced(coordinator_options={}) as (stack, receiver):
        params = SamplingParams(max_tokens=200, seed=3, rule=Rule.GUMBEL)
        with stack.client.stream(params=params, prompt_token_ids=PROMPT) as stream:
            for _ in stream:
                time.sleep(0.1)  # the scenario: it takes ten times as long as a round
        [root] = roots(receiver, 1)
    found = stages(root)
    assert to_blame(found) is Stage.CLIENT_CREDIT, found


def test_a_cancel_a_deadline_and_a_refusal_keep_what_there_was() -> None:
    with traced("emulated:step_ms=40", None) as (stack, receiver):
        with stack.client.stream(params=SamplingParams(max_tokens=200), prompt_token_ids=PROMPT) as stream:
            next(iter(stream))
        with pytest.raises(DeadlineExceededError):
            stack.client.generate(
                params=SamplingParams(max_tokens=200), prompt_token_ids=PROMPT, timeout_s=0.3
            )
        with pytest.raises(InvalidRequestError):
            stack.client.generate(params=SamplingParams(), prompt_token_ids=[10**8])
        found = {root.attributes.get("error.type"): root for root in roots(receiver, 3)}
    names = "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"
    cancelled, late, refused = (found[name] for name in names)
    assert [root.is_error for root in (cancelled, late, refused)] == [False, True, True]
    assert to_blame(stages(refused)) is Stage.COORDINATOR
    for root in (cancelled, late):
        assert to_blame(stages(root)) is Stage.VERIFY
        assert int(str(root.attributes["gen_ai.usage.output_tokens"])) > 0
        assert float(str(root.attributes["gen_ai.response.time_to_first_chunk"])) > 0


def test_a_draft_that_is_cut_off_and_one_that_hangs() -> None:
    options = {"draft_timeout_ms": 200.0}
    with traced(draft_link=Link(), coordinator_options=options) as (stack, receiver):
        assert stack.draft_proxy is not None
        generate(stack)
        params = SamplingParams(max_tokens=60, seed=3, rule=Rule.GUMBEL)
        for fault in (stack.draft_proxy.stall, stack.draft_proxy.cut):
            with stack.client.stream(params=params, prompt_token_ids=PROMPT) as stream:
                next(iter(stream))
                fault()
                for _ in stream:
                    pass
                check_completion(stream.completion)
            stack.draft_proxy.resume()
        spans = receiver.wait_for(lambda spans: sum(span.name == "generate" for span in spans) >= 3)
    _, hung, _cut = (span for span in spans if span.name == "generate")
    found = stages(hung)
    assert found[Stage.FAILOVER] + found[Stage.DRAFT] > 150, found
    calls = [span.attributes for span in spans if span.name == "draft"]
    outcomes = [call.get("specwire.outcome") for call in calls]
    is_late = [each in ("timed_out", "begun") for each in outcomes]
    assert [call.get("specwire.awaited") is False for call in calls] == is_late
    assert "timed_out" in outcomes, "its `draft.serve` would end after it"
    named = [event.name for span in spans for event in span.events if span.name == "round"]
    assert "draft lost" in named, "in a call, whose span has failed then, or between two"


def test_finer_spans_are_there_on_request() -> None:
    """Those of a round without them: `tests/processes/test_trace_of_generation.py`."""
    flag: dict[str, Any] = {"trace_detail": True}
    options: dict[str, Any] = {"coordinator_options": flag | {"num_outcomes": "0"}}
    with traced(verify_options=flag, draft_options=flag, **options) as (stack, receiver):
        done = generate(stack)
        roots(receiver, 1)
    spans = receiver.spans
    named = {name: [span for span in spans if span.name == name] for name in {span.name for span in spans}}
    assert len(named["round"]) == len(named["verify.serve"]) == done.speculation.num_rounds
    by_id = {span.span_id: span for span in spans}
    assert {by_id[span.parent_id].name for span in named["verify.serve"]} == {"verify"}
    assert {by_id[span.parent_id].name for span in named["draft.serve"]} == {"draft"}
    assert {"accept", "verify.queue", "verify.forward", "draft.queue", "draft.forward"} <= named.keys()
