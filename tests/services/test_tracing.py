"""Traces through real processes and a real OTLP receiver."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from opentelemetry import semconv

import specwire
from specwire.errors import ConfigError, InvalidRequestError
from specwire.telemetry import semantics, tracing
from specwire.telemetry.propagation import W3C, TraceContext
from tests.support.otlp_receiver import OtlpHttpReceiver, OtlpReceiver, refusing, silent
from tools.timeline.spans import RecordedSpan

pytestmark = pytest.mark.usefixtures("no_collector")

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
ONE_SPAN = """
from specwire.telemetry import semantics as names
from specwire.telemetry import tracing
t = tracing.configure("specwire-test")
with t.span("generate", attributes={"a": 1, "b": None, "c": ["x"]}) as span:
    span.set({"d": 0.5, "e": True})
    print(span.traceparent, t.enabled)
"""


def run(code: str, *args: str, to: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, whose spans go to this endpoint."""
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **({"OTEL_EXPORTER_OTLP_ENDPOINT": to} if to else {}), **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


def test_a_process_exports_its_spans_at_exit_and_says_which_process_it_is() -> None:
    """Its name and its resource are as the environment says."""
    with OtlpReceiver() as receiver:
        to, attributes = receiver.endpoint, "zone=b,k8s.pod.name=b,host.name=c"
        before = time.time_ns()
        done = run(ONE_SPAN, to=to, OTEL_RESOURCE_ATTRIBUTES="zone=a,service.name=from-resource")
        run(ONE_SPAN, to=to, OTEL_RESOURCE_ATTRIBUTES=attributes, OTEL_SERVICE_NAME="from-name")
        span, other = receiver.wait_for(lambda spans: len(spans) == 2)
    assert (span.name, span.parent_id) == ("generate", "")
    assert span.attributes == {"a": 1, "c": ["x"], "d": 0.5, "e": True}
    traceparent, enabled = done.stdout.split()
    assert re.fullmatch(f"00-{span.trace_id}-{span.span_id}-0[13]", traceparent)  # 2: the id is random
    assert enabled == "True"
    assert before < span.start_ns <= span.end_ns < time.time_ns()
    assert done.stderr == ""
    assert (span.service_name, other.service_name) == ("from-resource", "from-name")
    named = [[each.resource.get(name) for name in ("zone", "host.name")] for each in (span, other)]
    assert named == [["a", socket.gethostname()], ["b", "c"]]
    assert other.resource["k8s.pod.name"] == "b"
    assert span.resource["service.version"] == specwire.__version__
    assert span.resource["service.instance.id"] != other.resource["service.instance.id"]


def test_sampling_holds_for_a_whole_trace() -> None:
    code = """
import sys
from specwire.telemetry import tracing
t = tracing.configure("test")
with t.span("root") as root:
    t.span("child", start_ns=1, parent=root.traceparent).end(2)
    print(root.traceparent[-2:])
t.span("sampled elsewhere", start_ns=1, parent=sys.argv[1]).end(2)
"""
    with OtlpReceiver() as receiver:
        done = run(code, PARENT, to=receiver.endpoint, OTEL_TRACES_SAMPLER="parentbased_always_off")
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
            off.span("draft.forward", start_ns=0, parent=span.traceparent).end(0)

    # The bound asked for is 1 µs; the rest is for machines that are busy with something else.
    assert min(timeit.repeat(use, number=1000, repeat=20)) / 1000 < 5e-6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "no url"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:99999"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere.pem"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "2s"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0"),
        ("OTEL_RESOURCE_ATTRIBUTES", "zone"),
        ("OTEL_TRACES_SAMPLER", "sometimes"),
        *(("OTEL_TRACES_SAMPLER_ARG", text) for text in ("2", "half")),
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        *(("OTEL_BSP_MAX_QUEUE_SIZE", text) for text in ("0", "-1", "many")),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4096"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "-1"),
        ("OTEL_ATTRIBUTE_COUNT_LIMIT", "-1"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "all"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "1.5"),
        ("OTEL_PROPAGATORS", "b3"),
    ],
)
def test_what_is_unknown_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        tracing.configure("test")


def test_over_http_an_address_needs_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT=localhost:4318"):
        tracing.configure("test")


@pytest.mark.parametrize(
    "value",
    ["authorization", "Authorization: Bearer s3cret", "Authorization: Basic s3cret=", "a=b,api key=s3cret"],
)
def test_a_header_is_refused_without_being_shown(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", value)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_HEADERS=\(not shown\)") as refused:
        tracing.configure("test")
    assert "s3cret" not in str(refused.value)


def test_a_refusal_is_described_without_the_clients_text() -> None:
    error = InvalidRequestError("grammar.regex", "s3cret(", "a ) is missing in 's3cret('")
    assert tracing.described(error) == "grammar.regex=7 characters: INVALID_REQUEST"
    assert tracing.described(ConfigError("as it is")) == "as it is"


@pytest.mark.parametrize(
    "missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.sdk"]
)
def test_a_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "specwire.telemetry.recording", raising=False)
    with pytest.raises(ConfigError, match=r'pip install "specwire\[tracing\]"'):
        tracing.configure("test")


@pytest.mark.serial
@pytest.mark.sample(2)
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
        done = run(code, to=f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    longest_s, exit_s = map(float, done.stdout.split())
    assert longest_s < 1
    assert exit_s < 1.5
    assert len(done.stderr.splitlines()) <= 1
    assert "Traceback" not in done.stderr


MANY_SPANS = """
import time
from specwire.telemetry import tracing
t = tracing.configure("test")
for _ in range(40):
    with t.span("round", attributes={"a": "long text", "b": 1}) as span: span.event("x"); span.event("y")
time.sleep(0.5)
print(t.counts.num_exported)
"""


def exported_early(**variables: str) -> tuple[int, list[RecordedSpan]]:
    """Of 40 spans, those exported after 0.5 s; and those that a receiver has in the end."""
    with OtlpReceiver() as receiver:
        done = run(MANY_SPANS, to=receiver.endpoint, **variables)
        return int(done.stdout), receiver.spans


def test_batches_and_limits_of_a_span_are_as_the_environment_says() -> None:
    assert exported_early()[0] == 0  # 5 s, 512 spans
    limits = {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "4"}
    count, spans = exported_early(OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10", **limits)
    assert count >= 10
    assert {tuple(span.attributes.values()) for span in spans} <= {("long",), (1,)}
    assert exported_early(OTEL_BSP_SCHEDULE_DELAY="50")[0] == 40


def test_an_export_is_given_up_at_the_shorter_of_two_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import time
from specwire.telemetry import tracing
t = tracing.configure("test")
with t.span("round"): pass
began = time.monotonic()
while not t.counts.num_failed: time.sleep(0.01)
print(time.monotonic() - began)
"""
    with silent() as port:
        done = run(
            code,
            to=f"http://127.0.0.1:{port}",
            OTEL_EXPORTER_OTLP_TIMEOUT="600",
            OTEL_BSP_EXPORT_TIMEOUT="100",
            OTEL_BSP_SCHEDULE_DELAY="10",
        )
    assert float(done.stdout) < 20


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            [("traceparent", PARENT), ("tracestate", "a=1, b@c=2"), ("baggage", "user=1;p")],
            TraceContext(PARENT, "a=1,b@c=2", "user=1;p"),
        ),
        ([("traceparent", PARENT), ("traceparent", PARENT)], TraceContext()),
        ([("traceparent", PARENT + "-more"), ("tracestate", "a=1")], TraceContext()),
        ([("traceparent", "01" + PARENT[2:] + "-more")], TraceContext("01" + PARENT[2:] + "-more")),
        ([("traceparent", "ff" + PARENT[2:])], TraceContext()),
        ([("traceparent", PARENT.replace("cd", "00"))], TraceContext()),
        ([("tracestate", "a=1"), ("baggage", "x=1"), ("baggage", "y=2")], TraceContext(baggage="x=1,y=2")),
        ([("traceparent", PARENT), ("tracestate", "A=1"), ("baggage", "no value")], TraceContext(PARENT)),
        ([("traceparent", PARENT), ("tracestate", "a=" + "x" * 600)], TraceContext(PARENT)),
        ([("baggage", "a=" + "x" * 9000)], TraceContext()),
        ([("baggage", ",".join(f"k{i}=1" for i in range(65)))], TraceContext()),
    ],
)
def test_headers_are_taken_if_they_are_valid(headers: list[tuple[str, str]], expected: TraceContext) -> None:
    assert W3C.read(headers) == expected
    assert W3C.read(W3C.headers(expected)) == expected


JAEGER_CASE = """
import asyncio, sys
from specwire.errors import DeadlineExceededError
from specwire.telemetry import tracing
from specwire.telemetry.propagation import TraceContext
t = tracing.configure("specwire-test")
caller = TraceContext(sys.argv[1], "vendor=1", "user=7")
def ends(name, error, *links, **options):
    try:
        with t.span(name, **options) as span: [*map(span.link, links)]; raise error
    except BaseException: pass
with t.span("generate", kind=tracing.SpanKind.SERVER, parent=caller) as root:
    ends("verify", DeadlineExceededError("late"), sys.argv[1], "malformed", kind=tracing.SpanKind.CLIENT,
        parent=root.context, attributes={"names": ["a", "b"], "share": 0.5, "ready": True})
    ends("left", asyncio.CancelledError(), parent=root.context)
    with t.span("told", parent=root.context) as told:
        told.fail("UNAVAILABLE", "killed")
        told.fail("INTERNAL")
    lost = t.span("lost", start_ns=5, parent=root.context, kind=tracing.SpanKind.CLIENT)
    lost.fail("UNAVAILABLE")
    lost.end(7)
"""


@pytest.mark.parametrize(
    ("receive", "protocol"), [(OtlpReceiver, "grpc"), (OtlpHttpReceiver, "http/protobuf")]
)
def test_the_payload_is_what_jaeger_reads(
    receive: type[OtlpReceiver] | type[OtlpHttpReceiver], protocol: str
) -> None:
    """Jaeger shows `span.kind`, a reference for parent and links, `error` and `otel.status_description` for a
    status, logs for events, process tags for the resource, and `otel.scope.*` for the scope."""
    with receive() as receiver:
        done = run(JAEGER_CASE, PARENT, to=receiver.endpoint, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
        assert done.stderr == ""
        receiver.wait_for(lambda spans: len(spans) == 5)
    [group] = [group for request in receiver.requests for group in request.resource_spans]
    [scope] = group.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("specwire", specwire.__version__)
    process = {pair.key for pair in group.resource.attributes}
    assert process >= {"service.name", "service.version", "service.instance.id", "host.name"}
    spans = {span.name: span for span in scope.spans}
    root, verify, left, told, lost = (spans[n] for n in ("generate", "verify", "left", "told", "lost"))

    kinds = root.kind, verify.kind, left.kind, lost.kind
    server, client = root.SPAN_KIND_SERVER, root.SPAN_KIND_CLIENT
    assert kinds == (server, client, root.SPAN_KIND_INTERNAL, client)
    assert {span.trace_id.hex() for span in spans.values()} == {"ab" * 16}
    assert root.parent_span_id.hex() == "cd" * 8
    assert {span.parent_span_id for span in (verify, left, told, lost)} == {root.span_id}
    assert {span.trace_state for span in spans.values()} == {"vendor=1"}
    [link] = verify.links
    assert (link.trace_id.hex(), link.span_id.hex()) == ("ab" * 16, "cd" * 8)

    error = root.status.STATUS_CODE_ERROR
    statuses = [(span.status.code, span.status.message) for span in (root, verify, left, told, lost)]
    unset = (root.status.STATUS_CODE_UNSET, "")
    assert statuses == [unset, (error, "late"), unset, (error, "killed"), (error, "")]
    types = {
        name: pair.value.string_value
        for name, span in spans.items()
        for pair in span.attributes
        if pair.key == "error.type"
    }
    assert types == {
        "verify": "DEADLINE_EXCEEDED",
        "left": "CANCELLED",
        "told": "UNAVAILABLE",
        "lost": "UNAVAILABLE",
    }
    assert [event.name for event in left.events] == ["cancelled"]
    assert (lost.start_time_unix_nano, lost.end_time_unix_nano) == (5, 7)
    values = {pair.key: pair.value.WhichOneof("value") for pair in verify.attributes}
    assert (values["names"], values["share"], values["ready"]) == (
        "array_value",
        "double_value",
        "bool_value",
    )


def test_only_the_propagators_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = [("traceparent", PARENT), ("tracestate", "a=1"), ("baggage", "b=2")]
    for text, num_kept in (("", 3), ("tracecontext", 2), ("baggage", 1), ("none", 0)):
        monkeypatch.setenv("OTEL_PROPAGATORS", text)
        propagators = tracing.configure("test").propagators
        assert len(propagators.headers(W3C.read(headers))) == num_kept
        assert len(W3C.headers(propagators.read(headers))) == num_kept


def test_names_are_those_of_the_conventions() -> None:
    """What is not ours is in the package of the conventions, whose modules have a string for each name."""
    package = Path(semconv.__file__).parent
    known = "".join(path.read_text() for path in package.rglob("*_attributes.py"))
    ours = {name: text for name, text in vars(semantics).items() if name.isupper() and "." in str(text)}
    foreign = {text for text in ours.values() if not text.startswith("specwire.")}
    assert len(foreign) > 30
    assert not {name for name in foreign if f'Final = "{name}"' not in known}
    assert semantics.stage_attribute("draft") == "specwire.stage.draft_ms"
