"""The examples of docs/openai.md, as they stand there, against a front."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specwire.http.bodies.chat import ChatBody
from specwire.http.bodies.completion import CompletionBody
from specwire.http.bodies.responses import ResponsesBody
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, fronted

TEXT = (Path(__file__).parents[2] / "docs/openai.md").read_text()
here = entered(lambda: fronted("embedded", "embedded"))


def examples(here: Fronted, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert found
    return [code.replace("http://127.0.0.1:8080", here.url) for code in found]


def output(*command: str) -> str:
    environ = os.environ | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python(here: Fronted) -> None:
    completion, called = (output(sys.executable, "-c", code) for code in examples(here, "python"))
    assert "guesses accepted" in completion
    assert called.startswith("weather was called; ")


@pytest.mark.slow
def test_curl(here: Fronted) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl command")
    whole, streamed, called = (output("bash", "-c", code) for code in examples(here, "bash"))
    assert '"text_completion"' in whole
    assert '"accepted_prediction_tokens"' in streamed
    assert '"fate":"accepted"' in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"tool_calls"' in called


def test_every_parameter_is_documented() -> None:
    named = set(re.findall(r"\w+", TEXT))
    fields = {name for kind in (CompletionBody, ChatBody, ResponsesBody) for name in kind.model_fields}
    assert fields <= named, fields - named
