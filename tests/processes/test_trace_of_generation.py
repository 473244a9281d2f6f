"""One trace a generation over three real processes, seen by an OTLP collector: no orphans, right parents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as TracedSpan

from specwire import Client, Completion, Rule, SamplingParams
from specwire.cli.supervisor import Stack
from specwire.config.stack import UpConfig
from specwire.telemetry import semantics as names
from tests.support.fixtures import entered
from tests.support.otlp_receiver import OtlpReceiver
from tools.timeline.spans import RecordedSpan

PROMPT = [5, 9, 11, 2, 7]
PARENTS = {
    "admission": "generate",
    "round": "generate",
    "draft": "round",
    "verify": "round",
    "draft.serve": "draft",
    "verify.serve": "verify",
}
KINDS = {
    **dict.fromkeys(("generate", "draft.serve", "verify.serve"), TracedSpan.SPAN_KIND_SERVER),
    **dict.fromkeys(("draft", "verify"), TracedSpan.SPAN_KIND_CLIENT),
    **dict.fromkeys(("admission", "round"), TracedSpan.SPAN_KIND_INTERNAL),
}
SERVICES = {"draft.serve": "specwire-draft", "verify.serve": "specwire-verify"}
PARTS = (names.QUEUE_MS, names.FORWARD_MS, names.HANDLING_MS)
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


Traced = tuple[list[RecordedSpan], Completion, Completion]


receiver = entered(OtlpReceiver)


@pytest.fixture(scope="module")
def traced(receiver: OtlpReceiver) -> Traced:
    """Spans of two generations, one of them with a caller's trace context, and their completions."""
    config = UpConfig(
        target="emulated:step_ms=1",
        draft="emulated:step_ms=0.2,alpha=0.8",
        address="127.0.0.1:0",
        num_draft_tokens="3",
        num_outcomes="0",
        num_threads=1,
    )
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


def test_each_generation_is_one_trace_with_every_call_of_every_round(traced: Traced) -> None:
    spans, first, second = traced
    roots = [span for span in spans if span.name == "generate"]
    assert len(roots) == 2
    for root, done in zip(sorted(roots, key=lambda span: span.start_ns), (first, second), strict=True):
        counts = Counter(span.name for span in of_trace(spans, root.trace_id))
        num_rounds = done.speculation.num_rounds
        num_drafted = sum(done.speculation.acceptance_histogram)
        assert counts == {
            "generate": 1,
            "admission": 1,
            **dict.fromkeys(("round", "verify", "verify.serve"), num_rounds),
            **dict.fromkeys(("draft", "draft.serve"), num_drafted),
        }
    assert {span.trace_id for span in spans} == {root.trace_id for root in roots}


def test_kinds_are_right(traced: Traced, receiver: OtlpReceiver) -> None:
    groups = [group for request in receiver.requests for group in request.resource_spans]
    sent = [span for group in groups for scope in group.scope_spans for span in scope.spans]
    assert {span.name: span.kind for span in sent} == KINDS


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
    [counts] = first.speculation.by_source
    sources = [span.attributes[names.SOURCE] for span in rounds if names.SOURCE in span.attributes]
    assert sources == [counts.source] * counts.num_drafts, "only rounds with a draft have a source"
    calls = [span for span in of_trace(spans, root.trace_id) if span.name in ("draft", "verify")]
    assert all(count(span, "specwire.request_bytes") > 0 for span in calls)
    assert all(count(span, "specwire.response_bytes") > 0 for span in calls)


def test_a_call_and_its_service_say_the_same(traced: Traced) -> None:
    """The coordinator's span has the durations of the answer, and the rest of the round trip as network."""
    spans, _, _ = traced
    by_id = {span.span_id: span for span in spans}
    for serve in spans:
        if serve.name in SERVICES:
            call = by_id[serve.parent_id]
            parts_ms = [ms(serve, name) for name in PARTS]
            assert [ms(call, name) for name in PARTS] == pytest.approx(parts_ms, abs=1e-3)
            whole_ms = sum(parts_ms) + ms(call, names.NETWORK_MS)
            assert 0 < whole_ms <= call.duration_ns / 1e6 + 0.01


def ms(span: RecordedSpan, name: str) -> float:
    return float(str(span.attributes[name]))
