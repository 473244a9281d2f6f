"""A coordinator and a front on machines without the model's files: the verify service sends the tokenizer."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coordinator.service
import verify_service.service
from specwire import Client, SamplingParams, embedded
from specwire.config.services import CoordinatorConfig, VerifyConfig
from specwire.errors import HandshakeError
from specwire.text import tokenizer
from tests.support.fronts import front
from tests.support.harness import LOOPBACK, LoopThread

MESSAGES = [{"role": "user", "content": "sort a list"}]
PARAMS = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def thread() -> Iterator[LoopThread]:
    made = LoopThread()
    yield made
    made.close()


@pytest.fixture(scope="module")
def verify(thread: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its directory is gone once it is loaded."""
    directory = tmp_path_factory.mktemp("elsewhere") / "model"
    shutil.copytree(embedded.TARGET_DIR, directory)
    config = VerifyConfig(address=LOOPBACK, model=str(directory), num_threads=1, grace_s=0.0)
    with thread.entered(lambda: verify_service.service.serving(config)) as address:
        shutil.rmtree(directory)
        yield address


def coordinating(thread: LoopThread, verify: str, **options: Any) -> Any:
    config = CoordinatorConfig(address=LOOPBACK, verify_address=verify, grace_s=0.0, **options)
    return thread.entered(lambda: coordinator.service.serving(config))


@pytest.fixture(scope="module")
def address(thread: LoopThread, verify: str) -> Iterator[str]:
    with coordinating(thread, verify) as found:
        yield found


def test_texts_and_conversations_are_those_of_local_files(
    thread: LoopThread, verify: str, address: str
) -> None:
    with (
        coordinating(thread, verify, tokenizer="embedded") as local,
        Client(address) as ours,
        Client(local) as theirs,
    ):
        for prompt in ({"prompt": "def fibonacci(n):"}, {"messages": MESSAGES}):
            mine: Any = ours.generate(params=PARAMS, **prompt)
            other: Any = theirs.generate(params=PARAMS, **prompt)
            assert mine.text == other.text
            assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)
        [sent, read] = (client.get_model_info()[0] for client in (ours, theirs))
        assert sent.eos_token_ids == read.eos_token_ids
        assert sent.tokenizer_hash == read.tokenizer_hash


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_a_front_without_files_tokenizes(address: str) -> None:
    local = tokenizer.load(embedded.TARGET_DIR)
    assert local is not None
    with front(address) as http:
        found = post(f"http://{http}/tokenize", {"prompt": "import os"})["tokens"]
        assert found == local.encode("import os")
        assert post(f"http://{http}/detokenize", {"tokens": found})["prompt"] == "import os"
        found = post(f"http://{http}/tokenize", {"messages": MESSAGES})["tokens"]
        assert found == local.apply_chat_template(MESSAGES)


def test_a_front_that_cannot_have_it_says_why(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked of it that needs the tokenizer, and nothing else."""
    monkeypatch.setattr("specwire.rpc.wire.tokenizer_files.MAX_BYTES", 1_000)
    for options, reason in (
        ({"tokenizer": f"{tmp_path}/none"}, f"{tmp_path}/none is not a directory"),
        ({}, "--tokenizer names"),
    ):
        with front(address, **options) as http:
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(f"http://{http}/tokenize", {"prompt": "import os"})
            assert refused.value.code == 503
            assert reason in json.loads(refused.value.read())["error"]["message"]
            assert post(
                f"http://{http}/v1/completions", {"prompt": "import", "max_tokens": 1, "model": "model"}
            )


def test_a_tokenizer_that_cannot_be_sent_is_named(
    thread: LoopThread, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specwire.rpc.wire.tokenizer_files.MAX_BYTES", 1_000)
    with (
        pytest.raises(HandshakeError, match=r"the tokenizer of model has files of 0\.\d MiB.*--tokenizer"),
        coordinating(thread, verify),
    ):
        pass
