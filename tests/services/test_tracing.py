"""Traces through real processes and a real OTLP receiver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from specwire.cli.timeline.spans import RecordedSpan
from specwire.errors import ConfigError
from specwire.telemetry import tracing
from tests.support.otlp_receiver import OtlpHttpReceiver, OtlpReceiver, refusing, silent

pytestmark = pytest.mark.usefixtures("no_collector")

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
ONE_SPAN = """
from specwire.telemetry import tracing
t = tracing.configure("specwire-test")
with t.span("generate", attributes={"a": 1, "b": None, "c": ["x"]}) as span:
    span.set({"d": 0.5, "e": True})
    print(span.traceparent, t.enabled)
"""


def run(code: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def only(spans: list[RecordedSpan], name: str) -> RecordedSpan:
    [span] = [span for span in spans if span.name == name]
    return span


def test_a_process_exports_its_spans_at_exit() -> None:
    with OtlpReceiver() as receiver:
        before = time.time_ns()
        done = run(ONE_SPAN, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint)
        [span] = receiver.wait_for(bool)
    assert (span.name, span.service_name, span.parent_id) == ("generate", "specwire-test", "")
    assert span.attributes == {"a": 1, "c": ["x"], "d": 0.5, "e": True}
    traceparent, enabled = done.stdout.split()
    assert re.fullmatch(f"00-{span.trace_id}-{span.span_id}-0[13]", traceparent)  # 2: the id is random
    assert enabled == "True"
    assert before < span.start_ns <= span.end_ns < time.time_ns()
    assert done.stderr == ""


def test_over_http() -> None:
    with OtlpHttpReceiver() as receiver:
        run(
            ONE_SPAN,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        )
        assert only(receiver.wait_for(bool), "generate").service_name == "specwire-test"


def test_one_trace_over_two_processes() -> None:
    coordinator = """
import subprocess, sys
from specwire.telemetry import tracing
t = tracing.configure("coordinator")
with t.span("generate", parent=sys.argv[2]) as generate:
    with t.span("round", parent=generate.traceparent) as round_:
        with t.span("draft", parent=round_.traceparent) as draft:
            subprocess.run([sys.executable, "-c", sys.argv[1], draft.traceparent], check=True)
"""
    draft_service = """
import sys
from specwire.telemetry import tracing
t = tracing.configure("draft")
t.record("draft.forward", start_ns=1_000, end_ns=3_000, parent=sys.argv[1], attributes={tracing.BASE_LEN: 7})
"""
    with OtlpReceiver() as receiver:
        run(coordinator, draft_service, PARENT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=receiver.endpoint)
        spans = receiver.wait_for(lambda spans: len(spans) == 4)
    chain = [only(spans, name) for name in ("generate", "round", "draft", "draft.forward")]
    assert {span.trace_id for span in spans} == {"ab" * 16}
    assert [span.parent_id for span in chain] == ["cd" * 8, *(span.span_id for span in chain[:-1])]
    assert [span.service_name for span in chain] == ["coordinator"] * 3 + ["draft"]
    assert (chain[-1].start_ns, chain[-1].end_ns) == (1_000, 3_000)
    assert chain[-1].attributes == {tracing.BASE_LEN: 7}


def test_what_ends_a_span_is_noted_and_orphans_are_not_made() -> None:
    code = """
import asyncio
from specwire.telemetry import tracing
t = tracing.configure("test")
from specwire.errors import RequestCancelledError
for error in (RequestCancelledError(), ValueError("no"), asyncio.CancelledError()):
    try:
        with t.span(type(error).__name__, parent="malformed"):
            raise error
    except BaseException: pass
for parent in ("", "malformed", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
    t.record("orphan", start_ns=1, end_ns=2, parent=parent)
t.shutdown()
t.shutdown()
"""
    with OtlpReceiver() as receiver:
        assert run(code, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint).stderr == ""
        spans = receiver.wait_for(lambda spans: len(spans) == 3)
    assert [(span.attributes, span.is_error) for span in spans] == [
        ({"error.type": "RequestCancelledError"}, False),
        ({"error.type": "ValueError"}, True),
        ({"error.type": "CancelledError"}, False),
    ]
    assert {span.parent_id for span in spans} == {""}


def test_names_and_resource_from_the_environment() -> None:
    with OtlpReceiver() as receiver:
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        run(ONE_SPAN, **endpoint, OTEL_RESOURCE_ATTRIBUTES="zone=a,service.name=from-resource")
        run(ONE_SPAN, **endpoint, OTEL_RESOURCE_ATTRIBUTES="zone=b", OTEL_SERVICE_NAME="from-name")
        spans = receiver.wait_for(lambda spans: len(spans) == 2)
    assert [(s.service_name, s.resource["zone"]) for s in spans] == [
        ("from-resource", "a"),
        ("from-name", "b"),
    ]


def test_sampling_holds_for_a_whole_trace() -> None:
    code = """
import sys
from specwire.telemetry import tracing
t = tracing.configure("test")
with t.span("root") as root:
    t.record("child", start_ns=1, end_ns=2, parent=root.traceparent)
    print(root.traceparent[-2:])
t.record("sampled elsewhere", start_ns=1, end_ns=2, parent=sys.argv[1])
"""
    with OtlpReceiver() as receiver:
        done = run(
            code,
            PARENT,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
            OTEL_TRACES_SAMPLER="parentbased_always_off",
        )
        spans = receiver.wait_for(bool)
    assert int(done.stdout, 16) & 1 == 0
    assert [span.name for span in spans] == ["sampled elsewhere"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_being_asked_nothing_is_imported(variables: dict[str, str]) -> None:
    check = "import sys; print([name for name in sys.modules if 'opentelemetry' in name])"
    done = run(ONE_SPAN + check, **variables)
    assert done.stdout.split() == ["False", "[]"]


def test_without_being_asked_a_span_costs_nothing() -> None:
    off = tracing.configure("test")
    assert not off.enabled

    def use() -> None:
        with off.span("round", parent="", attributes=None) as span:
            off.record("draft.forward", start_ns=0, end_ns=0, parent=span.traceparent)

    # The bound asked for is 1 µs; the rest is for machines that are busy with something else.
    assert min(timeit.repeat(use, number=1000, repeat=20)) / 1000 < 5e-6


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
)
def test_what_is_unknown_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        tracing.configure("test")


@pytest.mark.parametrize(
    "missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.sdk"]
)
def test_a_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r'pip install "specwire\[tracing\]"'):
        tracing.configure("test")


@pytest.mark.serial
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("collector", [refusing, silent])
def test_a_collector_that_does_not_answer_blocks_nothing(
    collector: Callable[[], AbstractContextManager[int]], protocol: str
) -> None:
    code = """
import atexit, time
atexit.register(lambda: print(time.monotonic() - finished))
from specwire.telemetry import tracing
t = tracing.configure("test")
longest = 0
for number in range(6000):
    began = time.monotonic()
    with t.span("round", attributes={"number": number}): pass
    longest = max(longest, time.monotonic() - began)
time.sleep(0.3)
with t.span("round"): pass
finished = time.monotonic()
print(longest)
"""
    with collector() as port:
        done = run(
            code,
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
        )
    longest_s, exit_s = map(float, done.stdout.split())
    assert longest_s < 1
    assert exit_s < 1.5
    assert len(done.stderr.splitlines()) <= 1
    assert "Traceback" not in done.stderr


def test_every_attribute_is_in_the_table() -> None:
    names = [value for name, value in vars(tracing).items() if name.isupper() and isinstance(value, str)]
    assert len(names) > 20
    assert [name for name in names if name not in (tracing.__doc__ or "")] == []
