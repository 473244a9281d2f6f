"""The output items of `/v1/responses`, and the events that build them."""

from __future__ import annotations

from typing import Any

import pytest

from specwire.http.responses import Output
from specwire.http.tools.formats import HERMES
from specwire.http.tools.parser import ToolParser

CALL = '<tool_call>{"name": "f", "arguments": {"n": %d}}</tool_call>'
TEXT = f"One. {CALL % 1}\n{CALL % 2} Between. {CALL % 3}"
SHOWN = [
    ("message", "One."),
    ("f", '{"n": 1}'),
    ("f", '{"n": 2}'),
    ("message", "Between."),
    ("f", '{"n": 3}'),
]


def items(text: str, step: int = 1000, *, most: int | None = None, is_cut: bool = False) -> list[Any]:
    """Those of a text in pieces of so many characters, checked against the events."""
    output = Output(ToolParser(HERMES, {"f"}, most))
    events: list[Any] = []
    for start in range(0, len(text), step):
        events += output.add(text[start : start + step])
    events += output.end(is_cut=is_cut)
    for index, item in enumerate(output.items):
        about = [each for each in events if each["output_index"] == index]
        assert about[0]["item"]["id"] == about[-1]["item"]["id"] == item["id"]
        assert about[-1] == {"type": "response.output_item.done", "output_index": index, "item": item}
        deltas = [each["delta"] for each in about if each["type"].endswith(".delta")]
        assert "".join(deltas) == shown(item)[1]
    return output.items


def shown(item: Any) -> tuple[str, str]:
    if item["type"] == "message":
        return "message", item["content"][0]["text"]
    return item["name"], item["arguments"]


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_the_items_do_not_depend_on_how_the_text_was_cut(step: int) -> None:
    assert [shown(item) for item in items(TEXT, step)] == SHOWN


def test_calls_after_the_first_are_left_out_on_request() -> None:
    assert [shown(item) for item in items(TEXT, 3, most=1)] == [SHOWN[0], SHOWN[1], SHOWN[3]]


def test_an_output_without_text_is_an_empty_message() -> None:
    assert [shown(item) for item in items("")] == [("message", "")]


def test_what_is_cut_is_incomplete() -> None:
    statuses = [item["status"] for item in items(TEXT[: TEXT.index("1}")], is_cut=True)]
    assert statuses == ["completed", "incomplete"]
    [message] = items("One", is_cut=True)
    assert message["status"] == "incomplete"
    [call, rest] = items('<tool_call>{"name": "f", "arguments": {"n": oops')
    assert (call["status"], rest["type"]) == ("incomplete", "message")
