"""`/v1/responses` through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import Response

from specwire import SamplingParams, embedded
from tests.support.fronts import Fronted, front, fronted, save_chat_target

QUESTION = "How does a queue work?"
SAID = [{"role": "user", "content": QUESTION}]


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "x"}
TOOL = {"type": "function", "name": "f"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    target = save_chat_target(tmp_path_factory.mktemp("pair") / "target")
    with fronted(target, embedded.DRAFT_DIR) as running:
        yield running


def ask(here: Fronted, **changes: Any) -> Any:
    request: dict[str, Any] = {"model": here.model, "input": QUESTION, "max_output_tokens": 24}
    extra = {"seed": 7} | changes.pop("extra_body", {})
    return here.openai.responses.create(**request | changes, extra_body=extra)


def by_sdk(here: Fronted, messages: Any = SAID, **params: Any) -> Any:
    settings = SamplingParams(**{"max_tokens": 24, "seed": 7} | params)
    return here.stack.client.generate(messages=messages, params=settings)


def test_the_text_is_that_of_the_sdk(here: Fronted) -> None:
    answer, done = ask(here), by_sdk(here)
    assert answer.output_text == done.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == done.usage.prompt_tokens
    assert answer.usage.output_tokens == 24
    assert answer.specwire["seed"] == 7


def test_input_and_instructions_are_one_conversation(here: Fronted) -> None:
    before = ask(here)
    history = [*SAID, *(item.model_dump(exclude_none=True) for item in before.output)]
    history.append({"role": "user", "content": [{"type": "input_text", "text": "And a stack?"}]})
    answer = ask(here, input=history, instructions="Be brief.", temperature=0.5, top_p=0.9)
    messages = [
        {"role": "system", "content": "Be brief."},
        *SAID,
        {"role": "assistant", "content": before.output_text},
        {"role": "user", "content": "And a stack?"},
    ]
    assert answer.output_text == by_sdk(here, messages, temperature=0.5, top_p=0.9).text
    assert (answer.temperature, answer.top_p, answer.instructions) == (0.5, 0.9, "Be brief.")


def test_a_history_with_calls_is_that_of_the_chat(here: Fronted) -> None:
    """Text and calls of one response are one turn."""
    call = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    history = [
        *SAID,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "id": "fc_1", "status": "completed", **call},
        {"type": "function_call", "call_id": "c2", **call},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    function = {"name": "weather", "arguments": {"city": "Ulm"}}
    calls = [{"type": "function", "id": f"c{i}", "function": function} for i in (1, 2)]
    messages = [
        *SAID,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
    ]
    answer, done = ask(here, input=history), by_sdk(here, messages)
    assert (answer.usage.input_tokens, answer.output_text) == (done.usage.prompt_tokens, done.text)


def test_one_that_ends_by_itself_is_complete(here: Fronted) -> None:
    first = by_sdk(here).token_ids[0]
    answer = ask(here, extra_body={"stop_token_ids": [first]})
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    effort = ask(here, reasoning={"effort": "low"}, max_output_tokens=1)
    assert effort.usage.input_tokens > answer.usage.input_tokens
    assert effort.reasoning.effort == "low"


def test_the_events_of_a_stream(here: Fronted) -> None:
    events = list(ask(here, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    last: Response = events[-1].response
    assert "".join(deltas) == last.output_text == events[len(deltas) + 4].text == by_sdk(here).text
    assert len(deltas) > 1
    assert last.usage is not None
    assert last.usage.output_tokens == 24
    extra = {"seed": 7, "stop_token_ids": [by_sdk(here).token_ids[9]]}
    with here.openai.responses.stream(model=here.model, input=QUESTION, extra_body=extra) as stream:
        whole = stream.get_final_response()
    assert by_sdk(here).text.startswith(whole.output_text)
    assert whole.output_text, "their own accumulator follows it"


def test_events_are_named_on_the_wire(here: Fronted) -> None:
    body = {"model": here.model, "input": "x", "max_output_tokens": 1, "stream": True}
    text = httpx2.post(f"{here.url}/v1/responses", json=body).text
    assert text.startswith('event: response.created\ndata: {"type":"response.created","sequence_number":0,')
    assert "[DONE]" not in text


def test_an_error_in_mid_stream_is_an_event(here: Fronted) -> None:
    """Of the deadline, which is the front's own."""
    with front(here.stack.address, timeout_s=0.4) as address:
        body = {"model": here.model, "input": "x", "stream": True, "ignore_eos": True}
        text = httpx2.post(f"http://{address}/v1/responses", json=body, timeout=30).text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert '"code":"deadline_exceeded"' in last


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]"),
        ({"input": [CALL | {"arguments": "["}]}, "input[0].arguments"),
        ({"input": [*SAID, CALL, RESULT | {"call_id": "c2"}]}, "input[2].call_id"),
        ({"tools": [TOOL | {"strict": True}]}, "tools[0].strict"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "text": {"format": {"type": "json_object"}}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"max_tokens": 2}}, "max_tokens"),
    ],
)
def test_refusals(here: Fronted, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(here, **changes)
    assert refused.value.param == param
