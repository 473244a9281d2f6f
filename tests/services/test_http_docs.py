"""The examples of docs/openai.md, as they stand there, against a front."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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


def test_python(here: Fronted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for code in examples(here, "python"):
        exec(code, {})
    completion, called = capsys.readouterr().out.split("tokens a round\n")
    assert "guesses accepted" in completion
    assert called.startswith("weather was called; ")


@pytest.mark.slow
def test_curl(here: Fronted) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl command")
    environ = os.environ | {"NO_PROXY": "127.0.0.1"}
    whole, streamed, called = (
        subprocess.check_output(["bash", "-c", code], text=True, timeout=60, env=environ)
        for code in examples(here, "bash")
    )
    assert '"text_completion"' in whole
    assert '"accepted_prediction_tokens"' in streamed
    assert '"fate":"accepted"' in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"tool_calls"' in called


def test_every_parameter_is_documented() -> None:
    named = set(re.findall(r"\w+", TEXT))
    fields = {name for kind in (CompletionBody, ChatBody, ResponsesBody) for name in kind.model_fields}
    assert fields <= named, fields - named
