"""`specwire serve` as a user starts it: one command, a YAML file, and OpenAI's client."""

from __future__ import annotations

import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import psutil
import pytest

from tests.support.processes import running

KEY = "a-key-that-no-process-shows"
SAID: Any = [{"role": "user", "content": "Return the lines of a file."}]
FILE = f"""\
model: embedded
served-model-name: tiny
max_model_len: 256
max-num-seqs: 4
api_key: {KEY}
"""


@dataclass
class Served:
    """What it said at the start, and a client."""

    process: psutil.Process
    said: dict[str, str]
    client: openai.OpenAI


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("serve") / "serve.yaml"
    path.write_text(FILE)
    flags = ("--config", str(path), "--port", "0", "--address", "127.0.0.1:0", "--seed", "5")
    with running("serve", *flags) as command:
        lines = command.ready_line(), command.line(), command.line()
        said = dict(line.strip().split(" ", 1) for line in lines)
        with openai.OpenAI(base_url=f"{said['page']}v1", api_key=KEY, max_retries=0, timeout=60) as client:
            yield Served(psutil.Process(command.process.pid), said, client)


def test_the_draft_is_said_to_be_the_default(served: Served) -> None:
    assert served.said["draft"] == "embedded, the default; --draft none serves the target alone"


def test_a_chat_is_drafted_and_repeated_by_its_seed(served: Served) -> None:
    """Seeds of requests without one are drawn from the server's."""
    request: Any = {"model": "tiny", "messages": SAID, "max_tokens": 24, "temperature": 0.7}
    request["extra_body"] = {"num_draft_tokens": 4}
    first = served.client.chat.completions.create(**request)
    expected = random.Random(5).getrandbits(63)
    assert first.model_extra is not None
    assert first.model_extra["specwire"][0]["seed"] == expected
    assert first.model_extra["specwire"][0]["speculation"]["num_draft_tokens"] > 0
    again = served.client.chat.completions.create(**request, seed=expected)
    assert first.choices[0].message.content
    assert again.choices[0].message.content == first.choices[0].message.content


def test_limits_and_names_of_the_file(served: Served) -> None:
    [model] = served.client.models.list().data
    assert model.id == "tiny"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 256
    with pytest.raises(openai.BadRequestError, match="256"):
        served.client.completions.create(model="tiny", prompt="x " * 300, max_tokens=1)


def test_metrics_are_there_by_default(served: Served) -> None:
    url = f"{served.said['page']}metrics"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=30)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert b"specwire_spec_decode_num_draft_tokens_total" in response.read()


def test_the_key_is_required_and_shown_nowhere(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="another").models.list()
    services = served.process.children()
    assert len(services) == 3, "the draft runs in the target's process"
    lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not any(KEY in word for line in lines for word in line)
    assert not any(KEY in str(each.environ()) for each in services)
