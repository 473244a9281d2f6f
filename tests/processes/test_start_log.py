"""What `up` says before it is ready, by default; the line to try works. What a request is refused for."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from specwire import Client, ContextLengthError, SamplingParams
from tests.support.processes import Command, running, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def up() -> Iterator[Command]:
    argv = ["--address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--draft", "ngram"]
    with running("up", *argv, "--log-level", "info") as command:
        command.ready_line()
        yield command


def line(up: Command, pattern: str) -> str:
    [found] = re.findall(rf"NOTICE .*({pattern})", up.errors())
    return str(found)


def test_a_summary(up: Command) -> None:
    line(
        up,
        r"verify model embedded \(\d\.\d M parameters in float32, 2048 tokens of context\) on cpu; KV cache",
    )
    line(up, r"KV cache of 65536 tokens, \d+\.\d MB")
    line(up, r"target embedded \(.*\) at 127\.0\.0\.1:\d+")
    line(up, "rule auto; draft tokens a round auto; drafts by ngram")
    line(up, r"gRPC at 127\.0\.0\.1:\d+; try: curl ")


def test_the_line_to_try(up: Command) -> None:
    curl = line(up, "curl .*")
    done = subprocess.run([*shlex.split(curl), "-sf"], capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0


def test_a_refusal_is_logged_with_field_value_and_request_id(up: Command) -> None:
    address = re.findall(r"gRPC at (\S+);", up.errors())[0]
    with Client(address) as client, pytest.raises(ContextLengthError):
        client.generate("secret", SamplingParams(max_tokens=99999), request_id="mine")
    wait_until(lambda: "request_id=mine" in up.errors(), 10)
    [said] = [each for each in up.errors().splitlines() if "request_id=mine" in each]
    assert "coordinator.totals: request status=INVALID_ARGUMENT" in said
    assert "field=max_tokens value=99999 reason=CONTEXT_LENGTH" in said


def test_a_refusal_over_http_too(up: Command) -> None:
    body = json.dumps({"model": "embedded", "prompt": "secret", "top_p": 9, "max_tokens": 2}).encode()
    url = line(up, "http://[^/]*") + "/v1/completions"
    headers = {"content-type": "application/json", "x-request-id": "yours"}
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30)
    wait_until(lambda: "request_id=yours" in up.errors(), 10)
    [said] = [each for each in up.errors().splitlines() if "request_id=yours" in each]
    assert "status=400" in said
    assert "field=top_p" in said
    assert "secret" not in up.errors()
