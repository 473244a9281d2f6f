"""Conversations: messages of a chat, input items of `/v1/responses`, and both as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specwire.http.bodies.part import JsonObject, List, OnlyText, invalid
from specwire.text.unicode import HALVED, is_whole

_ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(JsonObject):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(JsonObject):
    """The function of a call."""

    name: str
    arguments: str


class ToolCall(JsonObject):
    """A call that an assistant has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(JsonObject):
    """One message of a conversation, including earlier answers in the form of a response."""

    role: str
    content: Annotated[str | List[TextPart] | None, OnlyText] = None
    name: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    audio: None = None


class TextItem(JsonObject):
    """A part of a message's content, of a request or of an earlier response."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Text = Annotated[str | List[TextItem], OnlyText]


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
"""None of them is a field: `entry` tells where an error is by the names of fields."""


InputItem = Annotated[
    Annotated[InputMessage, Tag("a message")]
    | Annotated[FunctionCall, Tag("a call")]
    | Annotated[FunctionCallOutput, Tag("its output")],
    Discriminator(
        lambda item: _TAGS.get(str(item.get("type") or "message")) if isinstance(item, dict) else None,
        custom_error_type="unsupported_item",
        custom_error_message=f"must be an item of type {', '.join(_TAGS)}",
    ),
]
Input = Annotated[
    Annotated[str, Tag("a string")] | Annotated[List[InputItem], Field(min_length=1), Tag("a list")],
    Discriminator(lambda given: "a list" if isinstance(given, list) else "a string"),
]


def of_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: parts joined, arguments of calls as objects; ApiError 400 names a
    field."""
    return [_as_turn(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _as_turn(name: str, message: Message) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise invalid(f"{name}.role", f"{message.role[:40]!r} is none of {', '.join(_ROLES)}")
    if message.content is None and not message.tool_calls:
        raise invalid(f"{name}.content", "is required of a message without tool_calls")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{name}.tool_calls", f"are the assistant's, not of role {message.role!r}")
    if (message.role == "tool") != (message.tool_call_id is not None):
        raise invalid(f"{name}.tool_call_id", "belongs to messages of role 'tool', and is required there")
    turn: dict[str, Any] = {"role": message.role, "content": joined(message.content)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = [
            as_call(f"{name}.tool_calls[{i}].function", call.function.name, call.function.arguments, call.id)
            for i, call in enumerate(message.tool_calls)
        ]
    return turn | ({"tool_call_id": message.tool_call_id} if message.tool_call_id is not None else {})


def as_call(param: str, name: str, arguments: str, call_id: str | None) -> dict[str, Any]:
    """A call as templates read it; ApiError 400 if the arguments of `param` are no JSON object."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise invalid(f"{param}.arguments", f"is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise invalid(f"{param}.arguments", "is not a JSON object")
    if not is_whole(json.dumps(read, ensure_ascii=False)):
        raise invalid(f"{param}.arguments", HALVED)
    function = {"name": name, "arguments": read}
    return {"type": "function", "function": function} | ({"id": call_id} if call_id is not None else {})


def of_items(
    items: Sequence[InputMessage | FunctionCall | FunctionCallOutput],
) -> list[dict[str, Any]]:
    """Items as templates read them: calls are those of one turn of the assistant, with its text before them.
    ApiError 400 names the field."""
    turns: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    for i, item in enumerate(items):
        if isinstance(item, InputMessage):
            turns.append({"role": item.role, "content": joined(item.content)})
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
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
    return turns


def joined(content: str | Sequence[TextPart | TextItem] | None) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
