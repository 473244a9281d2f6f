"""Input items of `/v1/responses`, and the conversation that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specwire.http.bodies.message import as_call
from specwire.http.bodies.part import JsonObject, List, OnlyText, invalid


class TextItem(JsonObject):
    """A part of a message's content, of a request or of an earlier response."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Text = Annotated[str | List[TextItem], OnlyText]


def _joined(parts: str | list[TextItem]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class InputMessage(JsonObject):
    """A message of the input, including earlier output."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCall(JsonObject):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    caller: None = None
    namespace: None = None


class FunctionCallOutput(JsonObject):
    """What an earlier call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: str | None = None
    status: str | None = None


_TAGS = {"message": "a message", "function_call": "a call", "function_call_output": "its output"}
"""None of them is a field: `validation` tells where an error is by the names of fields."""


InputItem = Annotated[
    Annotated[InputMessage, Tag("a message")]
    | Annotated[FunctionCall, Tag("a call")]
    | Annotated[FunctionCallOutput, Tag("its output")],
    Discriminator(
        lambda item: _TAGS.get(item.get("type") or "message") if isinstance(item, dict) else None,
        custom_error_type="unsupported_item",
        custom_error_message=f"must be an item of type {', '.join(_TAGS)}",
    ),
]
Input = Annotated[
    Annotated[str, Tag("a string")] | Annotated[List[InputItem], Field(min_length=1), Tag("a list")],
    Discriminator(lambda given: "a list" if isinstance(given, list) else "a string"),
]


def as_conversation(
    items: Sequence[InputMessage | FunctionCall | FunctionCallOutput],
) -> list[dict[str, Any]]:
    """Items as templates read them: calls are those of one turn of the assistant, with its text before them.
    ApiError 400 names the field."""
    turns: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    for i, item in enumerate(items):
        if isinstance(item, InputMessage):
            turns.append({"role": item.role, "content": _joined(item.content)})
        elif isinstance(item, FunctionCall):
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            call = as_call(f"input[{i}]", item.name, item.arguments, item.call_id)
            turns[-1].setdefault("tool_calls", []).append(call)
            call_ids.add(item.call_id)
        else:
            if item.call_id not in call_ids:
                raise invalid(
                    f"input[{i}].call_id", f"{item.call_id[:40]!r} is of no function_call before it"
                )
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
    return turns
