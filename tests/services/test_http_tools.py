"""Tool calls over HTTP: the OpenAI package against a real stack with a template that renders tools.

The examples of the page about it, of which some call tools, run here too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch

from specwire import embedded
from tests.support.fronts import Fronted, fronted
from tests.support.languages import save_speaker
from tests.support.pairs import MARKOV_VOCAB_SIZE, markov_model

PAGE = Path(__file__).parents[2] / "docs/openai.md"
TEMPLATE = (
    "{% for tool in tools or [] %}# tool {{ tool.function | tojson }}\n{% endfor %}"
    "{% if tools %}# write <tool_call>, JSON, </tool_call>\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n"
    "{% for call in m.tool_calls or [] %}# {{ call.function.name }}\n{% endfor %}{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}, "hours": {"$ref": "#/$defs/hours"}},
    "required": ["zone", "hours"],
    "$defs": {"hours": {"type": "integer", "minimum": 0, "maximum": 23}},
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}
STOP: Any = {"type": "function", "function": {"name": "stop", "description": "Ends all."}}
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in (NOW, STOP)]
"""Of `/v1/responses`."""
BAD: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
STRICT: Any = {"type": "function", "function": {"name": "f", "strict": True}}
SAID: Any = [{"role": "user", "content": "What time is it?"}]
PIECES = (
    *("Sure.", " <tool", "_call>", '{"name": "', "now", '", "arguments":'),
    *(' {"zone": "', "CE", 'T", "hours"', ": 2}", "}</tool_", "call>"),
)
"""What the speaker says, token by token, each time."""
NAMED: Any = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    template = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text(TEMPLATE)
    options = {"chat_template": str(template)}
    with fronted(embedded.TARGET_DIR, embedded.DRAFT_DIR, coordinator_options=options) as running:
        yield running


def save_caller(directory: Path) -> Path:
    """A model that goes from each token to the next one: from Q over the pieces to the end."""
    model = markov_model()
    with torch.no_grad():
        inputs = model.get_input_embeddings().weight
        inputs.copy_(
            torch.nn.functional.pad(
                100 * torch.eye(MARKOV_VOCAB_SIZE), (0, inputs.shape[1] - MARKOV_VOCAB_SIZE)
            )
        )
        model.lm_head.weight.copy_(inputs.roll(1, 0))
    save_speaker(model, directory, ["", "<1>", "<2>", "Q", *PIECES])
    (directory / "chat_template.jinja").write_text("{# <tool_call> #}{% if tools %}Q{% endif %}Q")
    return directory


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    with fronted(save_caller(tmp_path_factory.mktemp("speaker"))) as running:
        yield running


def ask(here: Fronted, **fields: Any) -> Any:
    given = {"model": here.model, "messages": SAID, "tools": [NOW, STOP], "max_tokens": 120, "seed": 5}
    return here.openai.chat.completions.create(**given | fields)


def respond(here: Fronted, **fields: Any) -> Any:
    given = {"model": here.model, "input": SAID, "tools": TOOLS, "max_output_tokens": 120}
    return here.openai.responses.create(**given | fields, extra_body={"seed": 5})


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PARAMETERS if name == "now" else {"maxProperties": 0})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("choice", "names"), [("required", {"now", "stop"}), (NAMED, {"now"})])
def test_a_forced_call_is_one(here: Fronted, choice: Any, names: set[str]) -> None:
    answer = ask(here, tool_choice=choice, n=2, logprobs=True)
    for each in answer.choices:
        assert (each.finish_reason, each.message.content) == ("tool_calls", None)
        [call] = each.message.tool_calls
        assert call.type == "function"
        assert call.id.startswith("call_")
        assert call.function.name in names
        check(call.function.name, call.function.arguments)
        assert each.logprobs.content


def test_a_streamed_call_is_the_same(here: Fronted) -> None:
    whole = ask(here, tool_choice=NAMED).choices[0].message.tool_calls[0]
    choices = [chunk.choices[0] for chunk in ask(here, tool_choice=NAMED, stream=True)]
    assert choices[0].delta.role == "assistant"
    assert not any(each.delta.content for each in choices)
    assert choices[-1].finish_reason == "tool_calls"
    assert not choices[-1].delta.tool_calls
    pieces = [piece for each in choices for piece in each.delta.tool_calls or ()]
    assert len(pieces) > 1
    assert {piece.index for piece in pieces} == {0}
    assert pieces[0].id
    assert (pieces[0].type, pieces[0].function.name) == ("function", "now")
    assert not any(piece.id or piece.function.name for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == whole.function.arguments


def test_a_call_that_is_cut_says_so(here: Fronted) -> None:
    [choice] = ask(here, tool_choice=NAMED, max_tokens=12).choices
    assert choice.finish_reason == "length"


def test_none_hides_the_tools(here: Fronted) -> None:
    hidden = ask(here, tool_choice="none", max_tokens=8)
    plain = ask(here, tools=openai.omit, max_tokens=8)
    assert hidden.choices[0].message.content == plain.choices[0].message.content
    assert (
        hidden.usage.prompt_tokens == plain.usage.prompt_tokens < ask(here, max_tokens=8).usage.prompt_tokens
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": openai.omit, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": [STOP, STOP]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"tool_choice": "required", "n": 2, "extra_body": {"use_beam_search": True}}, "tools"),
        ({"tool_choice": "required", "tools": [BAD]}, "tools.f.parameters"),
        ({"tools": [NOW, STRICT]}, "tools[1].function.strict"),
    ],
)
def test_refused_by_name(here: Fronted, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(here, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_the_text_is_found(speaker: Fronted, stream: bool) -> None:
    """Of a stream, by OpenAI's own client."""
    given: Any = {"model": speaker.model, "messages": SAID, "tools": [NOW, STOP], "temperature": 0}
    if stream:
        with speaker.openai.chat.completions.stream(**given) as events:
            [choice] = events.get_final_completion().choices
    else:
        [choice] = ask(speaker, **given).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Sure.")
    [call] = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {"zone": "CET", "hours": 2})


@pytest.mark.parametrize("fields", [{"tools": [STOP]}, {"tool_choice": "none"}], ids=["another", "none"])
def test_a_call_of_no_known_tool_is_content(speaker: Fronted, fields: dict[str, Any]) -> None:
    [choice] = ask(speaker, temperature=0, **fields).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "".join(PIECES))
    assert choice.message.tool_calls is None
    choices = [chunk.choices[0] for chunk in ask(speaker, temperature=0, stream=True, **fields)]
    assert "".join(each.delta.content or "" for each in choices) == "".join(PIECES)
    assert choices[-1].finish_reason == "stop"


def examples(here: Fronted, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return [
        code.replace("http://127.0.0.1:8080", here.url).replace('"embedded"', f'"{here.model}"')
        for code in found
    ]


def test_the_pages_examples_in_python(
    here: Fronted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for code in examples(here, "python"):
        exec(code, {})
    completion, called = capsys.readouterr().out.split("tokens a round\n")
    assert "guesses accepted" in completion
    assert called.startswith("weather was called; ")


@pytest.mark.slow
def test_the_pages_examples_with_curl(here: Fronted) -> None:
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


class TestResponses:
    """The same in `/v1/responses`."""

    def test_a_forced_call_is_that_of_the_chat(self, here: Fronted) -> None:
        """OpenAI's client follows its events."""
        given: Any = {"model": here.model, "input": SAID, "tools": TOOLS, "tool_choice": "required"}
        with here.openai.responses.stream(**given, extra_body={"seed": 5}) as stream:
            kinds = {event.type for event in stream}
            answer: Any = stream.get_final_response()
        assert not any(kind.startswith("response.output_text") for kind in kinds)
        [call] = answer.output
        in_chat = ask(here, tool_choice="required")
        [expected] = in_chat.choices[0].message.tool_calls
        assert (call.type, call.status, answer.status) == ("function_call", "completed", "completed")
        assert (call.name, call.arguments) == (expected.function.name, expected.function.arguments)
        assert answer.usage.input_tokens == in_chat.usage.prompt_tokens
        assert (answer.tools[0].name, answer.tools[0].parameters) == ("now", PARAMETERS)
        named = respond(here, tool_choice={"type": "function", "name": "now"})
        assert (named.output[0].name, named.tool_choice.name) == ("now", "now")

    def test_a_call_that_is_cut_is_incomplete(self, here: Fronted) -> None:
        answer = respond(here, tool_choice="required", max_output_tokens=12)
        assert {answer.status, *(item.status for item in answer.output)} == {"incomplete"}

    def test_text_and_a_call_that_the_model_writes(self, speaker: Fronted) -> None:
        message, call = respond(speaker, temperature=0).output
        assert (message.type, message.content[0].text) == ("message", "Sure.")
        assert (call.type, call.name, call.status) == ("function_call", "now", "completed")
        assert json.loads(call.arguments) == {"zone": "CET", "hours": 2}
        [hidden] = respond(speaker, temperature=0, tool_choice="none").output
        assert hidden.content[0].text == "".join(PIECES)

    def test_the_events_of_text_and_a_call(self, speaker: Fronted) -> None:
        events = list(respond(speaker, temperature=0, stream=True))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert [kind for i, kind in enumerate(kinds) if kinds[i - 1] != kind] == [
            *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
            *("function_call_arguments.delta", "function_call_arguments.done"),
            *("output_item.done", "completed"),
        ]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(deltas) > 1
        message, call = events[-1].response.output
        assert {(each.output_index, each.item_id) for each in deltas} == {(1, call.id)}
        assert "".join(each.delta for each in deltas) == call.arguments
        assert [event.item for event in events if event.type == "response.output_item.done"] == [
            message,
            call,
        ]
