"""The alert rules, by Prometheus' own tool; and a real Prometheus that scrapes a running stack.

Nothing is installed here. Without Prometheus they are skipped, unless REQUIRE_PROMETHEUS is set, as in CI.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from specwire import Rule, SamplingParams
from specwire.config.link import Link
from specwire.errors import SpecwireError
from specwire.telemetry.endpoint import MetricsEndpoint
from specwire.telemetry.metrics import Group
from tests.services.test_metrics import (
    DRAFT,
    HISTOGRAM,
    PROMPT,
    TARGET,
    TRACE,
    announced,
    panels,
    substituted,
)
from tests.support.fronts import front
from tests.support.harness import LOOPBACK, LocalStack, LoopThread, local_stack
from tests.support.manifests import K8S, ROOT

pytestmark = pytest.mark.serial

OBSERVABILITY = K8S / "components/observability"
RULES = OBSERVABILITY / "rules.yml"
UNTIL_S = 30.0


def program(name: str) -> str:
    """Its path; the test is skipped without it, or fails."""
    if path := shutil.which(name):
        return path
    missing = f"no {name} on the PATH (Debian: prometheus)"
    if os.environ.get("REQUIRE_PROMETHEUS"):
        pytest.fail(missing)
    pytest.skip(missing)


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(
    ("verb", "file"), [("check", RULES), ("test", Path(__file__).with_name("alerts.yml"))]
)
def test_promtool_finds_nothing(verb: str, file: Path) -> None:
    words = [program("promtool"), verb, "rules", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested_and_says_what_to_do() -> None:
    tested = Path(__file__).with_name("alerts.yml").read_text()
    page = (ROOT / "docs/metrics.md").read_text()
    runbook = (ROOT / "docs/runbook.md").read_text()
    assert re.findall(r"^### (Specwire\w+)$", runbook, re.M) == [rule["alert"] for rule in alerts()]
    assert all(name in page for name in re.findall(r"\bspecwire_\w+", runbook)), "metrics by their names"
    for rule in alerts():
        assert f"| `{rule['alert']}` |" in page
        assert f'alertname="{rule["alert"]}"' in tested
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def readings(expression: Any) -> Iterator[promql_parser.Expr]:
    """What a condition compares: a condition that does not hold has no result."""
    compares = isinstance(expression, promql_parser.BinaryExpr) and str(expression.op) in (
        *("==", "!=", ">", "<", ">=", "<="),
        *("and", "or", "unless"),
    )
    if not compares:
        yield expression
        return
    for part in (expression.lhs, expression.rhs):
        if not isinstance(part, promql_parser.NumberLiteral):
            yield from readings(part)


def queries() -> set[str]:
    """All of the dashboard, and all that the alerts compare."""
    shown = {substituted(target["expr"]) for panel in panels() for target in panel["targets"]}
    conditions = (promql_parser.parse(rule["expr"]) for rule in alerts())
    return shown | {each.prettify() for condition in conditions for each in readings(condition)}


class Prometheus:
    """A server that runs, as its HTTP API shows it."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=UNTIL_S) as response:
            return json.load(response)["data"]

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        with contextlib.suppress(urllib.error.URLError):  # it still starts
            found = self.get("alerts")["alerts"]
            return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}
        return set()

    def has(self, query: str) -> bool:
        """Whether it has a number for this query."""
        found = self.get("query", query=query)["result"]
        return any(not math.isnan(float(each["value"][1])) for each in found)


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str], *, soon: bool = False) -> Iterator[Prometheus]:
    """The component's configuration, but for where the targets are found and how often they are scraped.

    Args:
        soon: whether alerts fire within seconds instead of minutes.
    """
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    [job] = config["scrape_configs"]
    config["scrape_configs"] = [{"job_name": job["job_name"], "static_configs": [{"targets": targets}]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = re.sub(r"\[\d+m\]", "[4s]", RULES.read_text()) if soon else RULES.read_text()
    (folder / RULES.name).write_text(re.sub(r"for: \d+m", "for: 1s", rules) if soon else rules)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    [container] = [
        each["spec"]["template"]["spec"]["containers"][0]
        for each in yaml.safe_load_all((OBSERVABILITY / "prometheus.yaml").read_text())
        if each["kind"] == "Deployment"
    ]
    options = [each for each in container["args"] if each.startswith("--enable-feature")]
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program("prometheus"), *words, f"--web.listen-address={address}", *options], stderr=log
        )
    try:
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(UNTIL_S)


def answered(server: Prometheus, stack: LocalStack, http: str, wanted: set[str]) -> set[str]:
    """Generate until each query has a number; returns those that have none by then.

    Args:
        http: the front's address.
    """
    deadline = time.monotonic() + UNTIL_S
    body = json.dumps({"model": "m", "prompt": PROMPT, "max_tokens": 4, "stream": True}).encode()
    asked = urllib.request.Request(
        f"http://{http}/v1/completions", body, {"content-type": "application/json"}
    )
    while wanted and time.monotonic() < deadline:
        with urllib.request.urlopen(asked, timeout=UNTIL_S) as response:
            assert b"[DONE]" in response.read()
        stack.client.generate(params=SamplingParams(max_tokens=24, rule=Rule.GUMBEL), prompt_token_ids=PROMPT)
        with contextlib.suppress(urllib.error.URLError):  # it still starts
            wanted = {query for query in wanted if not server.has(query)}
    return wanted


def test_prometheus_scrapes_a_stack_and_every_query_has_an_answer(tmp_path: Path) -> None:
    program("prometheus")
    options = {"metrics_address": LOOPBACK}
    thread = LoopThread()
    with (
        contextlib.closing(thread),
        thread.entered(lambda: MetricsEndpoint(LOOPBACK, [Group(HISTOGRAM, object)])) as traced,
        announced() as addresses,
        local_stack(
            TARGET, DRAFT, coordinator_options=options, verify_options=options, draft_options=options
        ) as stack,
        front(stack.address, model_name="m", **options) as http,
        prometheus(tmp_path, [*addresses, traced.address]) as server,
    ):
        wanted = queries()
        assert len(wanted) > 50
        assert answered(server, stack, http, wanted) == set(), (tmp_path / "log").read_text()
        states = {
            each["name"]: each["health"] for group in server.get("rules")["groups"] for each in group["rules"]
        }
        assert states == {rule["alert"]: "ok" for rule in alerts()}
        now_s = time.time()
        window = {"start": str(now_s - 600), "end": str(now_s + 60)}
        [series] = server.get("query_exemplars", query="test_stage_seconds_bucket", **window)
        assert {each["labels"]["trace_id"] for each in series["exemplars"]} == {TRACE}


@pytest.mark.slow  # that each fires and is silent when it should is promtool's to say, above
def test_each_alert_is_provoked_as_the_runbook_says(tmp_path: Path) -> None:
    """A draft that guesses nothing, more clients than places and pages, a slow target; then no draft."""
    program("prometheus")
    shown = {"metrics_address": LOOPBACK}
    crowded = {"max_running": 2, "max_waiting": 4, "draft_timeout_ms": 200.0}
    with (
        announced() as addresses,
        local_stack(
            "emulated:step_ms=300",
            "emulated:step_ms=1,alpha=0",
            coordinator_options=shown | crowded,
            verify_options=shown | {"num_kv_tokens": 128},
            draft_options=shown,
            draft_link=Link(),
        ) as stack,
        prometheus(tmp_path, addresses, soon=True) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        ended = threading.Event()

        def ask(number: int) -> None:
            params = SamplingParams(max_tokens=8, rule=Rule.GUMBEL)
            prompt = [10 + number] * len(PROMPT)  # no pages are shared
            while not ended.is_set():
                with contextlib.suppress(SpecwireError):  # refused for good
                    stack.client.generate(params=params, prompt_token_ids=prompt)

        for number in range(8):
            clients.submit(ask, number)
        try:
            expected = {rule["alert"] for rule in alerts()}
            fired_within(server, expected - {"SpecwireDraftLost"})
            assert stack.draft_proxy is not None
            stack.draft_proxy.stall()
            fired_within(server, {"SpecwireDraftLost"})
        finally:
            ended.set()


def fired_within(server: Prometheus, wanted: set[str]) -> None:
    """Until each of these has fired."""
    deadline = time.monotonic() + 2 * UNTIL_S
    while wanted:
        assert time.monotonic() < deadline, wanted
        time.sleep(0.2)
        wanted = wanted - server.firing()
