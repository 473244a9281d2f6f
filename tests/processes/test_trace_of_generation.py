"""One trace a generation over three real processes, seen by an OTLP collector: no orphans, right parents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from specwire import Client, Completion, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.cli.timeline.spans import RecordedSpan
from specwire.config.services import UpConfig
from tests.support.otlp_receiver import OtlpReceiver

PROMPT = [5, 9, 11, 2, 7]
PARENTS = {
    "round": "generate",
    "draft": "round",
    "verify": "round",
    "accept": "round",
    "draft.queue": "draft",
    "draft.forward": "draft",
    "verify.queue": "verify",
    "verify.forward": "verify",
}
SERVICES = {
    "draft.queue": "specwire-draft",
    "draft.forward": "specwire-draft",
    "verify.queue": "specwire-verify",
    "verify.forward": "specwire-verify",
}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


Traced = tuple[list[RecordedSpan], Completion, Completion]


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Spans of two generations, one of them with a caller's trace context, and their completions."""
    config = UpConfig(
        target="emulated:step_ms=1",
        draft="emulated:step_ms=0.2,alpha=0.8",
        address="127.0.0.1:0",
        num_draft_tokens="3",
        num_outcomes="0",
        num_threads=1,
    )
    with OtlpReceiver() as receiver:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        with Stack(config, environ) as stack, Client(stack.address) as client:
            params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
            first = client.generate(params=params, prompt_token_ids=PROMPT)
            gumbel = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, rule=Rule.GUMBEL)
            second = client.generate(params=gumbel, prompt_token_ids=PROMPT, traceparent=CALLER)
        return receiver.spans, first, second


def of_trace(spans: list[RecordedSpan], trace_id: str) -> list[RecordedSpan]:
    return [span for span in spans if span.trace_id == trace_id]


def test_each_generation_is_one_trace_with_every_stage_of_every_round(traced: Traced) -> None:
    spans, first, second = traced
    roots = [span for span in spans if span.name == "generate"]
    assert len(roots) == 2
    for root, done in zip(sorted(roots, key=lambda span: span.start_ns), (first, second), strict=True):
        counts = Counter(span.name for span in of_trace(spans, root.trace_id))
        num_rounds = done.speculation.num_rounds
        num_drafted = sum(done.speculation.acceptance_histogram)
        assert counts == {
            "generate": 1,
            **dict.fromkeys(("round", "verify", "verify.queue", "verify.forward", "accept"), num_rounds),
            **dict.fromkeys(("draft", "draft.queue", "draft.forward"), num_drafted),
        }
    assert {span.trace_id for span in spans} == {root.trace_id for root in roots}


def test_parents_and_services_are_right(traced: Traced) -> None:
    spans, _, _ = traced
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if span.name == "generate":
            continue
        parent = by_id[span.parent_id]  # a KeyError here is an orphan
        assert parent.name == PARENTS[span.name]
        assert parent.trace_id == span.trace_id
        assert span.service_name == SERVICES.get(span.name, "specwire-coordinator")
        assert span.start_ns <= span.end_ns


def test_a_callers_trace_context_is_continued(traced: Traced) -> None:
    spans, _, _ = traced
    continued = [span for span in spans if span.name == "generate" and span.parent_id]
    assert [(span.trace_id, span.parent_id) for span in continued] == [(CALLER[3:35], CALLER[36:52])]


def count(span: RecordedSpan, name: str) -> int:
    value = span.attributes[name]
    assert isinstance(value, int)
    return value


def test_attributes_agree_with_the_completion(traced: Traced) -> None:
    spans, first, _ = traced
    root = min((span for span in spans if span.name == "generate"), key=lambda span: span.start_ns)
    assert root.attributes["gen_ai.usage.output_tokens"] == first.usage.completion_tokens == 20
    assert root.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    reasons = root.attributes["gen_ai.response.finish_reasons"]
    assert isinstance(reasons, Sequence)
    assert list(reasons) == ["length"]
    rounds = [span for span in of_trace(spans, root.trace_id) if span.name == "round"]
    for name, total in (
        ("specwire.num_draft_tokens", first.speculation.num_draft_tokens),
        ("specwire.num_accepted_tokens", first.speculation.num_accepted_tokens),
    ):
        assert sum(count(span, name) for span in rounds) == total
    calls = [span for span in of_trace(spans, root.trace_id) if span.name in ("draft", "verify")]
    assert all(count(span, "specwire.request_bytes") > 0 for span in calls)
    assert all(count(span, "specwire.response_bytes") > 0 for span in calls)
