"""Spans of the HTTP front and the SDK: one trace from the request's headers to the coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coordinator.servicer import GenerationServicer
from specwire import AsyncClient, SamplingParams
from specwire.errors import InvalidRequestError, ServiceUnavailableError
from specwire.telemetry.propagation import TraceContext
from tests.support.fronts import Fronted, fronted
from tests.support.harness import local_stack
from tests.support.otlp_receiver import OtlpReceiver
from tools.timeline.spans import RecordedSpan

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("no_collector")]

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
MODEL = "emulated:step_ms=2"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """Of spans that are exported at once."""
    with OtlpReceiver() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield running


@pytest.fixture
def here(receiver: OtlpReceiver) -> Iterator[Fronted]:
    with fronted(MODEL) as running:
        yield running


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the coordinator receives with the latest generation."""
    seen: dict[str, str] = {}
    generate = GenerationServicer.Generate

    def noted(self: Any, requests: Any, call: Any) -> Any:
        seen.clear()
        seen.update(dict(call.invocation_metadata()))
        return generate(self, requests, call)

    monkeypatch.setattr(GenerationServicer, "Generate", noted)
    return seen


def post(here: Fronted, **headers: str) -> httpx2.Response:
    body = {"model": here.model, "prompt": [3, 5, 7], "max_tokens": 8, "seed": 1}
    return httpx2.post(f"{here.url}/v1/completions", json=body, headers=headers, timeout=60)


def of_trace(spans: list[RecordedSpan], trace_id: str = "ab" * 16) -> dict[str, RecordedSpan]:
    return {span.name: span for span in spans if span.trace_id == trace_id}


def test_one_trace_from_the_request_to_the_coordinator(
    metadata: dict[str, str], here: Fronted, receiver: OtlpReceiver
) -> None:
    headers = {"traceparent": PARENT, "tracestate": "vendor=1", "baggage": "user=7", "x-request-id": "mine"}
    answer = post(here, **headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    names = ["POST /v1/completions", "text_completion", "generate"]
    spans = of_trace(receiver.wait_for(lambda spans: set(names) <= set(of_trace(spans))))
    server, client, generate = (spans[name] for name in names)
    parents = [span.parent_id for span in (server, client, generate)]
    assert parents == ["cd" * 8, server.span_id, client.span_id]
    assert [span.service_name for span in (server, client)] == ["specwire-http"] * 2
    expected = {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "specwire.request_id": "mine",
    }
    assert expected.items() <= server.attributes.items()
    host, port = here.stack.address.split(":")
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specwire",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "rpc.system.name": "grpc",
        "rpc.response.status_code": "OK",
        "rpc.method": "specwire.v1.GenerationService/Generate",
        "server.address": host,
        "server.port": int(port),
        "specwire.request_id": "mine",
    }
    assert expected.items() <= client.attributes.items()
    first_s = client.attributes["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first_s, float)
    assert 0 < first_s < client.duration_ns / 1e9
    assert {"x-request-id": "mine", "tracestate": "vendor=1", "baggage": "user=7"}.items() <= metadata.items()
    assert metadata["traceparent"][3:52] == f"{client.trace_id}-{client.span_id}"


@pytest.mark.parametrize("parent", ["", "00-" + "0" * 32 + "-" + "cd" * 8 + "-01"])
def test_the_access_log_has_the_trace_that_begins_here(
    here: Fronted, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture, parent: str
) -> None:
    caplog.set_level(logging.INFO, "specwire.http.access")
    headers = {"traceparent": parent} if parent else {}
    assert post(here, **{"x-request-id": "mine"}, **headers).status_code == 200

    def ended(spans: list[RecordedSpan]) -> list[RecordedSpan]:
        return [span for span in spans if span.attributes.get("specwire.request_id") == "mine"]

    trace_ids = {span.trace_id for span in ended(receiver.wait_for(ended))}
    records = [vars(each) for each in caplog.records if vars(each).get("request_id") == "mine"]
    [logged] = [each["trace_id"] for each in records if each["name"] == "specwire.http.access"]
    assert trace_ids == {logged}


def test_a_front_that_does_not_trace_passes_the_context_on(metadata: dict[str, str]) -> None:
    with fronted(MODEL) as here:
        headers = {"traceparent": PARENT, "tracestate": "vendor=1", "baggage": "user=7"}
        assert post(here, **headers).status_code == 200
        assert headers.items() <= metadata.items()
        assert metadata["x-request-id"].startswith("req-")
        assert post(here, traceparent=PARENT + "0").status_code == 200
        assert "traceparent" not in metadata


def test_whose_fault_it_was(here: Fronted, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request, a client that leaves, and a coordinator that is gone."""
    assert httpx2.get(f"{here.url}/v1/nothing", headers={"traceparent": PARENT}).status_code == 404
    with here.openai.completions.create(
        model=here.model, prompt=[1], max_tokens=4000, stream=True, extra_headers={"traceparent": PARENT}
    ) as stream:
        next(iter(stream))
    names = {"GET", "POST /v1/completions", "text_completion"}
    spans = of_trace(receiver.wait_for(lambda spans: names <= set(of_trace(spans))))
    refused = spans["GET"]
    assert refused.attributes["http.response.status_code"] == 404
    assert "error.type" not in refused.attributes
    for name in ("POST /v1/completions", "text_completion"):
        assert (spans[name].attributes["error.type"], spans[name].is_error) == ("CANCELLED", False)

    def gone(*_: object, **__: object) -> None:
        raise ServiceUnavailableError("gone")

    monkeypatch.setattr("specwire.client.streaming.Part.read", gone)
    assert post(here, traceparent=PARENT.replace("ab", "ef")).status_code == 503
    spans = of_trace(receiver.wait_for(lambda spans: len(of_trace(spans, "ef" * 16)) >= 2), "ef" * 16)
    for name in ("POST /v1/completions", "text_completion"):
        assert (spans[name].attributes["error.type"], spans[name].is_error) == ("UNAVAILABLE", True)


def test_the_sdk_joins_the_trace_of_its_application(metadata: dict[str, str]) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    options: dict[str, Any] = {"params": SamplingParams(max_tokens=4), "prompt_token_ids": [1]}

    async def generate(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.generate(**options, request_id="mine")
            await client.generate(**options, traceparent=TraceContext(PARENT, "vendor=1"))
            assert metadata["tracestate"] == "vendor=1"
            with pytest.raises(InvalidRequestError, match="request_id"):
                await client.generate(**options, request_id="no spaces")

    try:
        with local_stack(MODEL) as stack, provider.get_tracer("app").start_as_current_span("own") as own:
            token = context.attach(baggage.set_baggage("user", "7"))
            asyncio.run(generate(stack.address))
            stack.client.generate(**options)
            assert metadata["baggage"] == "user=7"
            context.detach(token)
    finally:  # the API has no way to take a provider back
        trace._TRACER_PROVIDER = None
        trace._TRACER_PROVIDER_SET_ONCE._done = False
    first, second, third, _ = exporter.get_finished_spans()
    for span in (first, third):
        assert span.parent is not None
        assert span.parent.span_id == own.get_span_context().span_id
    assert second.context is not None
    assert f"{second.context.trace_id:x}" == "ab" * 16
    assert (first.name, first.kind) == ("text_completion", trace.SpanKind.CLIENT)
    assert first.attributes is not None
    assert first.attributes["specwire.request_id"] == "mine"
