"""A collector that works, refuses, or stays silent: what is generated is the same, and memory is bounded."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from coordinator.metrics import TABLE as COORDINATOR
from specwire import Rule, SamplingParams
from specwire.engine.metrics import TABLE as ENGINE
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
from specwire.telemetry.metrics import TRACING
from specwire.telemetry.span_queue import SpanQueue
from tests.support.harness import local_stack
from tests.support.otlp_receiver import OtlpReceiver, silent
from tools.timeline.spans import RecordedSpan

pytestmark = pytest.mark.usefixtures("no_collector")

PAGE = (Path(__file__).parents[2] / "docs/jaeger.md").read_text()
PROMPT = [3, 5, 7, 11]
QUEUE = 32
EXPORT_S = "600"
"""Timeout of an export: the first batch never comes back, so that a queue that is full stays full."""

TIMEOUT_S = 60.0
"""Far over what anything here takes: only a hang comes near."""


def test_what_a_collector_takes_is_counted_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tracers, configure = list[tracing.Tracing](), tracing.configure

    def noted(service_name: str) -> tracing.Tracing:
        tracers.append(configure(service_name))
        return tracers[-1]

    monkeypatch.setattr(tracing, "configure", noted)
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        with local_stack("emulated:step_ms=0.2", "emulated:step_ms=0.1,alpha=0.7") as stack:
            for seed in range(3):
                params = SamplingParams(max_tokens=16, seed=seed, rule=Rule.GUMBEL)
                stack.client.generate(params=params, prompt_token_ids=PROMPT)
        num_exported = sum(tracer.counts.num_exported for tracer in tracers)
        assert len(receiver.spans) == num_exported > 3 * 8
        for tracer in tracers:
            counts = tracer.counts
            assert (counts.num_queued, counts.num_dropped, counts.num_failed, counts.num_untraced) == (0,) * 4
        by_id = {span.span_id: span for span in receiver.spans}
        assert {span.name for span in receiver.spans if span.parent_id not in by_id} == {"generate"}
        check_page(receiver.spans)


NOT_EVERYWHERE = {"draft.prepare", "stage.<stage>_ms", "request_id"}
"""In the page's table: another span, a placeholder, and what not every request has."""


def check_page(spans: list[RecordedSpan]) -> None:
    """Every span and attribute of the page's table is in a real trace, and made by whom it says."""
    rows = re.findall(r"^\| (`.*?) \| ((?:INTERNAL|SERVER|CLIENT), .*?) \| (.*?) ?\|$", PAGE, re.M)
    assert len(rows) == 6
    for row in rows:
        names, made_by, described = (re.findall("`(.+?)`", cell) for cell in row)
        services = {word for word in made_by if word.startswith("specwire-")}
        named = set(described[: described.index("draft lost")] if "draft lost" in described else described)
        for name in names:
            alike = [span for span in spans if span.name == name]
            assert alike or name == "draft.prepare", f"no span {name}"  # that depends on who is faster
            assert {span.service_name for span in alike} <= services, name
            found = {text.removeprefix("specwire.") for span in alike for text in span.attributes}
            assert named - NOT_EVERYWHERE <= found or not alike, (name, named - found)


def test_every_name_on_the_page_exists() -> None:
    attributes = {text for name, text in vars(names).items() if name.isupper() and isinstance(text, str)}
    metrics = {metric.name for table in (COORDINATOR, ENGINE, TRACING) for metric in table}
    named = set(re.findall(r"`((?:specwire|gen_ai|error)\.[\w.]+)`", PAGE))
    assert len(named) > 8
    assert named - {"specwire.timing"} <= attributes, "the exception is a field over HTTP"
    counted = set(re.findall(r"`(specwire_\w+)", PAGE))
    assert len(counted) > 8
    assert counted <= metrics


@contextlib.contextmanager
def full_tracer(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[tracing.Tracing]:
    """One whose queue is full, and whose collector stays silent."""
    with silent() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", str(QUEUE))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", EXPORT_S)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        tracer = tracing.configure("test")
        deadline = time.monotonic() + TIMEOUT_S
        while tracer.counts.num_queued < 2 * QUEUE:  # a batch on its way, and a full queue behind it
            assert time.monotonic() < deadline
            with tracer.span("round"):
                pass
        yield tracer
        tracer.shutdown(100)


def test_a_generation_that_finds_the_queue_full_is_traced_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with full_tracer(monkeypatch) as tracer, OtlpReceiver() as receiver:
        caller = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
        with tracer.span("generate", parent=caller) as root:
            with tracer.span("round", parent=root.traceparent) as child:
                assert child.traceparent == root.traceparent
            assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", root.traceparent)
        assert tracer.counts.num_untraced == 1
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        other = tracing.configure("another service")
        other.span("verify.forward", start_ns=1, parent=root.traceparent).end(2)
        with other.span("draft", parent=root.traceparent), other.span("known"):
            pass
        other.shutdown(int(TIMEOUT_S * 1e3))
        assert [span.name for span in receiver.spans] == ["known"]


@pytest.mark.parametrize("flags", ["00", "02"])
def test_what_is_not_sampled_is_not_counted_as_dropped(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    """The SDK sets the flag of random trace ids, 02, in what it does not sample, too."""
    with full_tracer(monkeypatch) as tracer:
        before = tracer.counts.num_dropped
        parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-" + flags
        for name in ("generate", "round"):
            assert tracer.span(name, parent=parent).traceparent == parent
        assert (tracer.counts.num_dropped, tracer.counts.num_untraced) == (before, 0)


def test_a_sampler_that_asks_no_parent_drops_single_spans_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with full_tracer(monkeypatch, OTEL_TRACES_SAMPLER="always_on") as tracer:
        with tracer.span("generate") as root:
            assert root.traceparent.endswith("-01") or root.traceparent.endswith("-03")
        assert tracer.counts.num_untraced == 0


def test_spans_that_end_on_many_threads_keep_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with full_tracer(monkeypatch) as tracer:

        def end_many() -> None:
            for _ in range(200):
                with tracer.span("round"):
                    pass

        threads = [threading.Thread(target=end_many) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert tracer.counts.num_queued == 2 * QUEUE
        assert tracer.counts.num_dropped >= 8 * 200


class Switched(SpanExporter):
    """Takes spans or not, as told."""

    result = SpanExportResult.FAILURE

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self.result


def test_a_collector_that_fails_is_sent_little_until_it_is_back() -> None:
    exporter, provider = Switched(), TracerProvider(shutdown_on_exit=False)
    queue = SpanQueue(exporter, 1000, 5000, 512)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("test")

    def end(count: int) -> None:
        for _ in range(count):
            tracer.start_span("round").end()

    end(1)
    queue.force_flush()
    counts = queue.counts
    assert (counts.num_failed, counts.num_dropped) == (1, 0)
    end(500)
    assert counts.num_queued <= 64
    assert counts.num_dropped > 0
    exporter.result = SpanExportResult.SUCCESS
    queue.force_flush()
    num_dropped, num_exported = counts.num_dropped, counts.num_exported
    end(500)
    queue.force_flush()
    assert (counts.num_dropped, counts.num_exported) == (num_dropped, num_exported + 500)
    queue.shutdown()
