"""Metrics of running services, scraped as Prometheus does; the page and the dashboard that name them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import verify_service.service
from coordinator.ledger import Ledger
from coordinator.metrics import TABLE as COORDINATOR
from coordinator.totals import OK, STATUSES, CallRecord, Totals
from draft_service.learner import TABLE as LEARNING
from specwire import Client, Completion, DeadlineExceededError, InvalidRequestError, Rule, SamplingParams
from specwire.completion import Stage
from specwire.config.services import VerifyConfig
from specwire.config.stack import UpConfig
from specwire.engine.metrics import TABLE as ENGINE
from specwire.errors import ConfigError, ResourceExhaustedError, UnauthenticatedError
from specwire.http.metrics import TABLE as HTTP
from specwire.telemetry.endpoint import PATH, MetricsEndpoint
from specwire.telemetry.logs import TextFormatter
from specwire.telemetry.metrics import TRACING, Counter, Gauge, Group, Histogram, HistogramData, Metric
from specwire.telemetry.vllm_names import EQUIVALENTS
from tests.support.fronts import front
from tests.support.harness import LOOPBACK, LocalStack, local_stack

DOCS = Path(__file__).parents[2] / "docs"
PROMPT = [7, 8, 9] * 16
TARGET, DRAFT = "emulated:step_ms=1", "emulated:step_ms=0.2,alpha=0.7"
MODEL_NAMES = {("model_name", TARGET), ("model_name", DRAFT)}
EVERYTHING: tuple[Metric[Any], ...] = (*COORDINATOR, *ENGINE, *LEARNING, *HTTP, *TRACING)
TIMEOUT_S = 30.0

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(address: str) -> list[Sample]:
    with urllib.request.urlopen(f"http://{address}{PATH}", timeout=TIMEOUT_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def scrape(address: str) -> Scraped:
    """All samples by name and labels, without the model's name, which those of a service share."""
    return {
        (sample.name, frozenset(sample.labels.items() - MODEL_NAMES)): sample.value
        for sample in samples(address)
    }


def value(found: Scraped, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def num_requests(found: Scraped, status: str, finish_reason: str = "") -> float:
    return value(found, "specwire_requests_total", status=status, finish_reason=finish_reason)


class Addresses(logging.Handler):
    """Where the services of this process say that their metrics are, in the order of their start."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found += re.findall(r"http://(\S+)/metrics", record.getMessage())


@contextlib.contextmanager
def announced() -> Iterator[list[str]]:
    """The addresses of the metrics of services that start meanwhile, in the order of their start."""
    handler, log = Addresses(), logging.getLogger("specwire.telemetry.endpoint")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class Observed:
    """A stack, what was generated on it, and the addresses of its metrics by role."""

    def __init__(self, stack: LocalStack, addresses: dict[str, str]) -> None:
        self.stack = stack
        self.addresses = addresses
        self.done: list[Completion] = []

    def generate(self, seed: int, **options: Any) -> None:
        params = SamplingParams(max_tokens=24, seed=seed, rule=Rule.GUMBEL, **options)
        self.done.append(self.stack.client.generate(params=params, prompt_token_ids=PROMPT))

    def scrape(self, role: str, until: Callable[[Scraped], object] = lambda found: True) -> Scraped:
        """As soon as it holds: a client has its last message a moment before the request is counted."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until(found := scrape(self.addresses[role])):
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        return found

    def ended(self, status: str, count: int) -> Scraped:
        def counted(found: Scraped) -> bool:
            named = [n for (name, labels), n in found.items() if ("status", status) in labels]
            return sum(named) >= count

        return self.scrape("coordinator", counted)


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    options = {"metrics_address": LOOPBACK}
    with (
        announced() as addresses,
        local_stack(
            TARGET, DRAFT, coordinator_options=options, verify_options=options, draft_options=options
        ) as stack,
        front(stack.address, metrics_address=LOOPBACK) as address,
    ):
        roles = ("verify", "draft", "coordinator", "http")
        running = Observed(stack, dict(zip(roles, addresses, strict=True)))
        urllib.request.urlopen(f"http://{address}/health", timeout=TIMEOUT_S).close()
        for seed in range(3):
            running.generate(seed)
        yield running


def test_a_coordinators_counts_agree_with_its_completions(observed: Observed) -> None:
    observed.generate(3, num_draft_tokens=2)
    found = observed.ended(OK, len(observed.done))
    speculations = [done.speculation for done in observed.done]
    expected = {
        "specwire_prompt_tokens_total": len(PROMPT) * len(observed.done),
        "specwire_generation_tokens_total": 24 * len(observed.done),
        "specwire_prefix_cache_hit_tokens_total": sum(done.usage.cached_tokens for done in observed.done),
        "specwire_rounds_total": sum(each.num_rounds for each in speculations),
        "specwire_prepared_rounds_total": sum(each.num_prepared for each in speculations),
        "specwire_spec_decode_num_drafts_total": sum(sum(each.acceptance_histogram) for each in speculations),
        "specwire_spec_decode_num_draft_tokens_total": sum(each.num_draft_tokens for each in speculations),
        "specwire_spec_decode_num_accepted_tokens_total": sum(e.num_accepted_tokens for e in speculations),
        "gen_ai_server_time_to_first_token_seconds_count": len(observed.done),
        "gen_ai_server_time_per_output_token_seconds_count": len(observed.done),
        "specwire_requests_running": 0,
        "specwire_requests_waiting": 0,
        "specwire_requests_paused": 0,
    }
    assert {name: value(found, name) for name in expected} == expected
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        [counted] = {each.by_source[0].source for each in speculations}
        metric = f"specwire_spec_decode_{name}_per_source_total"
        assert value(found, metric, source=counted) == sum(getattr(each, name) for each in speculations)
    assert expected["specwire_prefix_cache_hit_tokens_total"] > 0, "the second found pages of the first"
    assert num_requests(found, OK, "length") == len(observed.done)
    assert sum(each.accepted_per_position[1] for each in speculations) == value(
        found, "specwire_spec_decode_num_accepted_tokens_per_pos_total", position="1"
    )
    assert sum(
        each.drafted_per_position[3] for each in speculations if len(each.drafted_per_position) > 3
    ) == value(found, "specwire_spec_decode_num_draft_tokens_per_pos_total", position="3")
    after = (Stage.EMIT, Stage.CLIENT_CREDIT, Stage.COORDINATOR)  # they go on when the completion is made
    for stage in Stage:
        total_s = sum(done.timing.of(stage) for done in observed.done) / 1e3
        counted_s = value(found, "specwire_stage_seconds_total", stage=stage)
        goes_on = stage in after
        assert counted_s == pytest.approx(total_s) or (goes_on and counted_s > total_s), stage
        by_request_s = value(found, "specwire_request_stage_seconds_sum", stage=stage)
        assert by_request_s == pytest.approx(counted_s)
    first_s = value(found, "gen_ai_server_time_to_first_token_seconds_sum")  # from the arrival
    told_s = sum(done.timing.time_to_first_token_ms for done in observed.done) / 1e3
    assert first_s == pytest.approx(told_s) or first_s > told_s
    assert first_s < value(found, "gen_ai_server_request_duration_seconds_sum", status=OK)
    count = value(found, "gen_ai_server_request_duration_seconds_bucket", status=OK, le="+Inf")
    assert count == len(observed.done)
    for role in ("draft", "verify"):
        assert value(found, "specwire_replicas", role=role, state="available") == 1
        assert value(found, "specwire_replicas", role=role, state="unavailable") == 0
    assert 0 < value(found, "specwire_chosen_draft_tokens") <= 4
    assert value(found, "specwire_requests_without_draft_total") == 0


@pytest.mark.parametrize("role", ["draft", "verify"])
def test_an_engines_counts_agree_with_its_status(observed: Observed, role: str) -> None:
    observed.stack.assert_idle_within(TIMEOUT_S)
    found, status = observed.scrape(role), observed.stack.status(role)
    expected = {
        "specwire_engine_streams": 0,
        "specwire_engine_requests": 0,
        "specwire_engine_requests_waiting": 0,
        "specwire_engine_step_sequences_count": status.num_steps,
        "specwire_engine_tokens_total": status.num_tokens,
        "specwire_engine_prefix_cache_hit_tokens_total": status.num_hit_tokens,
        "specwire_engine_preemptions_total": 0,
        "specwire_engine_kv_page_tokens": status.page_size,
        "specwire_engine_kv_pages_shared": 0,
    }
    assert {name: value(found, name, role=role) for name in expected} == expected
    pages = {
        s: value(found, "specwire_engine_kv_pages", role=role, state=s) for s in ("held", "cached", "free")
    }
    assert pages == {
        "held": 0,
        "cached": status.num_cached_pages,
        "free": status.num_free_pages - status.num_cached_pages,
    }
    assert 0 < value(found, "specwire_engine_forward_seconds_total", role=role) < 60
    assert value(found, "process_resident_memory_bytes") > 1e6


@pytest.mark.parametrize(("role", "model"), [("coordinator", TARGET), ("verify", TARGET), ("draft", DRAFT)])
def test_metrics_of_a_model_have_its_name(observed: Observed, role: str, model: str) -> None:
    table = COORDINATOR if role == "coordinator" else ENGINE
    names = {metric.name for metric in table}
    found = [each for each in samples(observed.addresses[role]) if family(each.name) in names]
    assert len(found) >= len(names)
    assert {each.labels["model_name"] for each in found} == {model}


def test_requests_that_fail_are_counted_by_status(observed: Observed) -> None:
    with pytest.raises(InvalidRequestError):
        observed.stack.client.generate(params=SamplingParams(max_tokens=4), prompt_token_ids=[1 << 30])
    assert num_requests(observed.ended("INVALID_ARGUMENT", 1), "INVALID_ARGUMENT") == 1
    before = value(observed.scrape("coordinator"), "specwire_generation_tokens_total")
    params = SamplingParams(max_tokens=8000)
    with observed.stack.client.stream(params=params, prompt_token_ids=PROMPT) as stream:
        next(iter(stream))
    found = observed.ended("CANCELLED", 1)
    assert num_requests(found, "CANCELLED") == 1
    assert value(found, "specwire_generation_tokens_total") > before, "its work counts all the same"
    assert value(found, "gen_ai_server_request_duration_seconds_count", status=OK) == len(observed.done)
    with Client(observed.stack.address, timeout_s=0.3) as client, pytest.raises(DeadlineExceededError):
        client.generate(params=params, prompt_token_ids=PROMPT)
    found = observed.ended("DEADLINE_EXCEEDED", 1)
    assert num_requests(found, "CANCELLED") == 1, "who gives up at its deadline has not cancelled"


def test_the_texts_of_a_search_are_tokens_that_come_at_once() -> None:
    params = SamplingParams(max_tokens=8, num_beams=2, num_return_sequences=2, temperature=0, ignore_eos=True)
    options = {"metrics_address": LOOPBACK}
    with announced() as found, local_stack(TARGET, coordinator_options=options) as stack:
        done = stack.client.generate(params=params, prompt_token_ids=PROMPT)
        running = Observed(stack, {"coordinator": found[-1]})
        after = running.ended(OK, 1)
    assert value(after, "specwire_generation_tokens_total") == done.usage.completion_tokens == 16
    assert value(after, "gen_ai_server_time_per_output_token_seconds_count") == 0


def test_what_is_refused_at_the_door_is_counted(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps({"name": "a", "sha256": hashlib.sha256(b"known").hexdigest()}))
    options = {"metrics_address": LOOPBACK, "tokens": str(tokens)}
    with announced() as found, local_stack(TARGET, coordinator_options=options) as stack:
        running = Observed(stack, {"coordinator": found[-1]})
        with Client(stack.address, token="unknown") as client, pytest.raises(UnauthenticatedError):
            client.generate("x")
        after = running.ended("UNAUTHENTICATED", 1)
    assert num_requests(after, "UNAUTHENTICATED") == 1


def test_scrapes_beside_running_streams(observed: Observed) -> None:
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(observed.generate, 100 + i) for i in range(8)]
        while not all(work.done() for work in running):
            for role in ("coordinator", "draft", "verify"):
                observed.scrape(role)
        for work in running:
            work.result()
    found = observed.ended(OK, len(observed.done))
    assert value(found, "specwire_generation_tokens_total") >= 24 * len(observed.done)


def test_a_line_in_the_log_for_each_request(observed: Observed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.totals")
    observed.generate(50, stop_token_ids=(5,))
    observed.ended(OK, len(observed.done))
    [record] = [record for record in caplog.records if record.name == "coordinator.totals"]
    line = TextFormatter().format(record).partition("coordinator.totals: request ")[2]
    facts = dict(pair.split("=") for pair in line.split())
    assert (facts["status"], facts["prompt_tokens"]) == (OK, str(len(PROMPT)))
    assert facts["rounds"] == str(observed.done[-1].speculation.num_rounds)
    assert "trace_id" not in facts, "nothing is traced here"
    assert all(re.fullmatch(r"[A-Za-z_]+|[\d.]+", fact) for fact in facts.values()), "no text, no ids"


# --- the endpoint -----------------------------------------------------------------------------------


class Numbers:
    """Something that counts."""

    answer = 42
    calls = 0


TABLE: tuple[Metric[Numbers], ...] = (Gauge("test_answer", "The answer.", lambda source: source.answer),)


def ask(address: str, request: bytes) -> bytes:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        try:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(4096), b""))
        except ConnectionError:  # it was closed before it had read all
            return b""


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.1", b"200 OK"),
        (b"GET /metrics?name=x HTTP/1.0", b"200 OK"),
        (b"GET / HTTP/1.1", b"404 Not Found"),
        (b"GET /metricsx HTTP/1.1", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1", b"405 Method Not Allowed"),
        (b"nonsense", b"404 Not Found"),
    ],
)
async def test_it_answers_one_question(request_line: bytes, status: bytes) -> None:
    async with MetricsEndpoint(LOOPBACK, [Group(TABLE, Numbers)]) as endpoint:
        answer = await asyncio.to_thread(ask, endpoint.address, request_line + b"\r\nHost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert f"Content-Length: {len(body)}".encode() in head
    assert (b"test_answer 42.0\n" in body) == (status == b"200 OK")


STARTED_S = time.time()
TRACE = "0af7651916cd43dd8448eb211c80319c"
BY_STAGE: dict[tuple[str, ...], HistogramData] = {
    ("draft",): HistogramData([0.1, 1]),
    ("verify",): HistogramData([0.1, 1]),
}
BY_STAGE["draft",].add(0.5, 3, TRACE)
BY_STAGE["draft",].add(1)
HISTOGRAM: tuple[Metric[object], ...] = (
    Histogram("test_stage_seconds", "By stage.", lambda _: BY_STAGE, ("stage",)),
)
PROMETHEUS_ACCEPTS = (
    b"application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    b"text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


async def asked(accept: bytes) -> tuple[str, str]:
    """Content type and body of a scrape of `HISTOGRAM`."""
    async with MetricsEndpoint(LOOPBACK, [Group(HISTOGRAM, object, {"role": "draft"})]) as endpoint:
        request = b"GET /metrics HTTP/1.1\r\nHost: x\r\naccept: " + accept + b"\r\n\r\n"
        head, _, body = (await asyncio.to_thread(ask, endpoint.address, request)).partition(b"\r\n\r\n")
    [kind] = re.findall(r"Content-Type: (.*?);", head.decode())
    return kind, body.decode()


async def test_openmetrics_has_histograms_by_label_with_exemplars() -> None:
    kind, body = await asked(PROMETHEUS_ACCEPTS)
    assert kind == "application/openmetrics-text"
    [family] = [each for each in openmetrics_families(body) if each.name == "test_stage_seconds"]
    samples = {(each.name, each.labels["stage"], each.labels.get("le", "")): each for each in family.samples}
    assert {each.labels["role"] for each in family.samples} == {"draft"}
    assert samples["test_stage_seconds_sum", "draft", ""].value == 2.5
    counts = [samples["test_stage_seconds_bucket", "draft", le].value for le in ("0.1", "1.0", "+Inf")]
    assert counts == [0, 4, 4], "to the first bound that is not exceeded"
    assert samples["test_stage_seconds_count", "verify", ""].value == 0
    [exemplar] = [each.exemplar for each in family.samples if each.exemplar]
    assert (exemplar.labels, exemplar.value) == ({"trace_id": TRACE}, 0.5), "the traced one, not the latest"
    assert STARTED_S <= float(exemplar.timestamp or 0) <= time.time()


async def test_openmetrics_has_vllms_names() -> None:
    table: tuple[Metric[object], ...] = (Gauge("vllm:num_requests_running", "Requests.", lambda _: 3),)
    async with MetricsEndpoint(LOOPBACK, [Group(table, object)]) as endpoint:
        text = (await endpoint.text(openmetrics=True)).decode()
    [sample] = [line for line in text.splitlines() if "num_requests_running" in line and line[0] != "#"]
    assert sample == "vllm:num_requests_running 3.0"


@pytest.mark.parametrize(
    "accept", [b"", b"*/*", b"text/plain", b"text/plain, application/openmetrics-text; version=1.0.0; q=0.0"]
)
async def test_who_does_not_ask_for_openmetrics_gets_the_older_text(accept: bytes) -> None:
    kind, body = await asked(accept)
    assert kind == "text/plain"
    assert TRACE not in body
    assert 'test_stage_seconds_bucket{le="1.0",role="draft",stage="draft"} 4.0\n' in body
    assert list(text_string_to_metric_families(body))


async def test_connections_are_bounded_and_silent_and_oversized_ones_do_not_block_others() -> None:
    async with MetricsEndpoint(LOOPBACK, [Group(TABLE, Numbers)]) as endpoint:
        host, port = endpoint.address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(7)]
        assert await asyncio.to_thread(ask, endpoint.address, b"x" * 100_000) == b""
        assert b"200 OK" in await asyncio.to_thread(ask, endpoint.address, b"GET /metrics HTTP/1.1\r\n\r\n")
        silent.append(await asyncio.open_connection(host, int(port)))
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b"", "one too many is closed at once"
        for _, other in [(reader, writer), *silent]:
            other.close()


async def test_what_cannot_be_bound_is_named() -> None:
    async with MetricsEndpoint(LOOPBACK, []) as endpoint:
        with pytest.raises(ConfigError, match=f"--metrics-address {endpoint.address}: cannot be bound"):
            async with MetricsEndpoint(endpoint.address, []):
                pass


async def test_a_service_whose_metrics_cannot_be_shown_ends() -> None:
    """With its threads; that of the event loop on which it loaded ends with the loop."""
    before = set(threading.enumerate())
    async with MetricsEndpoint(LOOPBACK, []) as endpoint:
        config = VerifyConfig(model="emulated:step_ms=1", metrics_address=endpoint.address)
        with pytest.raises(ConfigError, match="--metrics-address"):
            async with verify_service.service.serving(config):
                pass
    left = {thread for thread in set(threading.enumerate()) - before if not thread.daemon}
    assert not [thread for thread in left if not thread.name.startswith("asyncio_")]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r'pip install "specwire\[metrics\]"'):
        MetricsEndpoint(LOOPBACK, [])


def test_without_an_address_nothing_is_imported() -> None:
    code = (
        "import asyncio, sys; from specwire.telemetry import endpoint, tracing; import coordinator.metrics\n"
    )
    code += "from specwire.config.services import DraftConfig\n"
    code += "address = DraftConfig().metrics_address\n"
    code += "asyncio.run(endpoint.serving(address, [], tracing.Tracing(), 'draft').__aenter__())\n"
    code += "print([name for name in sys.modules if 'prometheus' in name])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_request_that_never_ran_has_a_status_and_a_duration() -> None:
    totals = Totals()
    call = CallRecord(totals, Ledger())
    with pytest.raises(ResourceExhaustedError), totals.record(call):
        raise ResourceExhaustedError("full")
    assert totals.requests["RESOURCE_EXHAUSTED", ""] == 1
    assert sum(totals.duration_s["RESOURCE_EXHAUSTED",].counts) == 1
    assert sum(totals.wait_s.counts) == 0
    assert {status for status, _ in totals.requests} == {OK, *STATUSES}


# --- the flags --------------------------------------------------------------------------------------


def test_up_gives_each_service_a_port_of_its_own() -> None:
    ports = ["127.0.0.1:9464", "127.0.0.1:9465", "127.0.0.1:9466"]
    assert UpConfig(metrics_address=ports[0]).metrics_addresses == ports
    assert UpConfig(metrics_address="127.0.0.1:0").metrics_addresses == ["127.0.0.1:0"] * 3
    assert UpConfig().metrics_addresses == [""] * 3
    fronted = UpConfig(metrics_address="127.0.0.1:9464", http_address="127.0.0.1:8080", replicas=2)
    assert [fronted.verify(n).metrics_address for n in (0, 1)] == ["127.0.0.1:9466", "127.0.0.1:9467"]
    assert fronted.front().metrics_address == "127.0.0.1:9468"


# --- the page and the dashboard ---------------------------------------------------------------------


def substituted(query: str) -> str:
    """A query of the dashboard, with Grafana's variables as they are when nothing is selected."""
    return re.sub(r"\$(job|model_name)", ".*", query.replace("$__rate_interval", "1m"))


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    """Of a query, by a real parser of PromQL."""
    found: list[promql_parser.VectorSelector] = []

    def look(expression: Any) -> None:
        if isinstance(expression, promql_parser.VectorSelector):
            found.append(expression)
        elif isinstance(expression, promql_parser.MatrixSelector):
            found.append(expression.vector_selector)
        for name in ("expr", "lhs", "rhs", "args", "param"):
            part = getattr(expression, name, None)
            for each in part if isinstance(part, list) else [part]:
                if isinstance(each, promql_parser.Expr):
                    look(each)

    look(promql_parser.parse(substituted(query)))
    assert found, query
    return found


def family(name: str) -> str:
    """The metric that a sample belongs to."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return base if any(metric.name == base for metric in EVERYTHING) else name


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((DOCS / "grafana/specwire.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_every_query_of_the_dashboard_reads_what_is_there(observed: Observed) -> None:
    labels: dict[str, set[str]] = {}
    for sample in (each for address in observed.addresses.values() for each in samples(address)):
        labels.setdefault(sample.name, set()).update(sample.labels)
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(queries) > 30
    for query in queries:
        for selector in selectors(query):
            assert selector.name in labels, query
            given = {matcher.name for matcher in selector.matchers.matchers}
            assert given - {"job"} <= labels[selector.name], query
            assert given >= {"job"} | labels[selector.name] & {"model_name"}, query
    shown = {family(str(selector.name)) for query in queries for selector in selectors(query)}
    assert {metric.name for metric in EVERYTHING} - shown == {
        "specwire_engine_kv_page_tokens",
        "specwire_verify_kv_usage",  # of the pages, which are shown, for what asks one endpoint only
    }


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads((DOCS / "grafana/specwire.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variable, *others = dashboard["templating"]["list"]
    assert [each["name"] for each in others] == ["job", "model_name"]
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    assert {panel["datasource"]["uid"] for panel in panels()} == {f"${{{variable['name']}}}"}


def test_every_metric_is_on_the_page_as_it_is_in_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)(?:\{(.*?)\})?`<br>(\w+) \| (.+?) \| `(.+?)` \|$", (DOCS / "metrics.md").read_text(), re.M
    )
    on_page = [
        (name, tuple(labels.split(", ")) if labels else (), kind, text)
        for name, labels, kind, text, _ in rows
    ]
    assert on_page == [(m.name, m.labels, m.kind, m.help) for m in EVERYTHING]
    for name, _, _, _, query in rows:
        assert name in {family(str(selector.name)) for selector in selectors(query)}, query


@pytest.mark.parametrize("metric", EVERYTHING, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric[Any]) -> None:
    assert re.fullmatch(r"(specwire|gen_ai_server|http_server)_[a-z_]+[a-z]", metric.name)
    assert metric.name.endswith("_total") == isinstance(metric, Counter)
    assert metric.help.endswith(".")
    assert not re.search(r"_(ms|ns|milliseconds)(_|$)", metric.name), "seconds, as Prometheus wants them"


# --- under vLLM's names: a dashboard that was built for vLLM reads them --------------------------------


def test_each_name_of_vllm_stands_for_a_metric_and_for_one_only() -> None:
    ours = {metric.name: metric for table in (COORDINATOR, ENGINE) for metric in table}
    assert {each.ours for each in EQUIVALENTS} <= set(ours)
    for table in (COORDINATOR, ENGINE):
        shown = [each.theirs for each in EQUIVALENTS for metric in table if each.ours == metric.name]
        assert len(set(shown)) == len(shown)
    for each in EQUIVALENTS:
        assert each.theirs.endswith("_total") == each.ours.endswith("_total")
        assert each.theirs.endswith("_seconds") == each.ours.endswith("_seconds")


def test_the_page_has_the_same_names_of_vllm() -> None:
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
