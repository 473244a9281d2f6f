"""Messages of a conversation, as OpenAI's API writes them and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from specwire.http.bodies.part import JsonObject, List, OnlyText, invalid

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


def as_conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
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
    parts = message.content
    text = "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
    turn: dict[str, Any] = {"role": message.role, "content": text}
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
    function = {"name": name, "arguments": read}
    return {"type": "function", "function": function} | ({"id": call_id} if call_id is not None else {})
