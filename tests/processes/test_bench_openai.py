"""`specwire bench serve` with vLLM's flags, against OpenAI's API of our own front and as vLLM is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specwire import SamplingParams, embedded
from specwire.cli import main as cli
from specwire.errors import InternalError
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, fronted
from tools.bench.backends import OpenAIServer
from tools.bench.metrics import RequestRecord
from tools.bench.prompts import Prompt

pytestmark = pytest.mark.usefixtures("restored")
running = entered(lambda: fronted(embedded.TARGET_DIR))


def bench(*flags: object) -> int:
    common = ("--num-prompts", 4, "--temperature", 0, "--max-tokens", 6)
    return cli.main(["bench", "serve", *map(str, (*common, *flags))])


def result(path: Path, *flags: object) -> dict[str, Any]:
    assert bench(*flags, "--save-result", "--result-filename", path) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_same_command_measures_it(running: Fronted, backend: str, tmp_path: Path) -> None:
    flags = ("--backend", backend, "--base-url", running.url, "--max-concurrency", 2, "--ignore-eos")
    found = result(tmp_path / "found.json", *flags)
    assert (found["backend"], found["completed"], found["failed"]) == (backend, 4, 0)
    assert found["model_id"] == running.model
    assert found["total_output_tokens"] == 4 * 6
    assert found["total_input_tokens"] > 0
    assert 0 < found["median_ttft_ms"] < found["median_e2el_ms"]


def test_random_prompts_have_their_lengths(running: Fronted, tmp_path: Path) -> None:
    lengths = ("--random-input-len", 24, "--random-output-len", 5, "--ignore-eos")
    flags = ("--server", running.stack.address, "--dataset-name", "random", *lengths)
    found = result(tmp_path / "found.json", *flags, "--request-rate", 50)
    assert (found["request_rate"], found["total_input_tokens"]) == (50, 4 * 24)
    assert found["total_output_tokens"] == 4 * 5


def test_random_text_by_a_tokenizer(running: Fronted, tmp_path: Path) -> None:
    lengths = ("--random-input-len", 24, "--random-output-len", 5, "--tokenizer", embedded.TARGET_DIR)
    flags = ("--backend", "openai", "--base-url", running.url, "--dataset-name", "random", *lengths)
    found = result(tmp_path / "found.json", *flags)
    assert found["completed"] == 4
    assert found["total_input_tokens"] > 4 * 12


def test_sharegpts_first_turns(running: Fronted, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "import os"}, {"from": "gpt", "value": "import sys"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    flags = ("--server", running.stack.address, "--dataset-name", "sharegpt", "--dataset-path", path)
    found = result(tmp_path / "found.json", *flags)
    assert found["completed"] == 4
    assert 0 < found["total_input_tokens"] <= 4 * len("import os")


def test_what_the_server_refuses_is_counted(running: Fronted, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--backend", "openai", "--base-url", running.url, "--model", "another") == 1
    out = capsys.readouterr().out
    assert "0 completed, 4 failed (4 INVALID_ARGUMENT)" in out
    assert "HTTP 404" in out


def test_nothing_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--backend", "openai", "--base-url", "http://127.0.0.1:1") == 1
    assert "error: nothing serves at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "ftp://x", "127.0.0.1:8000"])
def test_addresses_that_are_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--backend", "openai", "--base-url", url) == 2
    assert f"error: --base-url {url}: is not http://HOST" in capsys.readouterr().err


@pytest.mark.parametrize(
    "event", [[7], {"choices": [7]}, {"choices": [{"text": 7}]}, {"usage": {"prompt_tokens": 3}}]
)
async def test_answers_that_are_none_fail_alone(event: Any) -> None:
    """With a typed error, which belongs to their request."""
    body = f"data: {json.dumps(event)}\n\n"
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, text=body))
    async with httpx2.AsyncClient(base_url="http://x", transport=transport) as client:
        server = OpenAIServer(client, "/v1/completions", "m", is_chat=False)
        with pytest.raises(InternalError, match="not an event of OpenAI's API: "):
            await server.send(Prompt(text="a"), SamplingParams(), RequestRecord(), lambda: 0.0)
