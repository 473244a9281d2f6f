"""The calls of one choice, as OpenAI's API writes them. No I/O."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from specwire.http.bodies.calling import Calling
from specwire.http.tools.parser import CallBegins, Content, Event, ToolParser

Json = dict[str, Any]


def parser_of(body: Calling) -> ToolParser:
    """Of the text that answers a request with tools."""
    names = {function.name for function in body.callable_functions}
    return ToolParser(body.call_format, names, 1 if body.parallel_tool_calls is False else None)


class Calls:
    """Deltas of a text, and the message that they add up to."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self._num_begun = 0

    @property
    def are_complete(self) -> bool:
        """Whether there are calls, and the arguments of all are complete."""
        return self._num_begun > 0 and self._parser.is_complete

    def add(self, text: str) -> Json:
        """The delta of more text; empty while nothing is certain."""
        return self._delta(self._parser.feed(text))

    def end(self) -> Json:
        """The delta of what was held back at the end."""
        return self._delta(self._parser.flush())

    def message(self, text: str) -> Json:
        """The message of a whole text."""
        delta = self._delta([*self._parser.feed(text), *self._parser.flush()])
        message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
        calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
        return message | ({"tool_calls": calls} if calls else {})

    def _delta(self, events: Iterable[Event]) -> Json:
        content, calls = "", list[Json]()
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallBegins):
                call_id, function = "call_" + secrets.token_hex(12), {"name": event.name, "arguments": ""}
                index, self._num_begun = self._num_begun, self._num_begun + 1
                calls.append({"index": index, "id": call_id, "type": "function", "function": function})
            else:
                index = self._num_begun - 1
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += event.text
        return ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})
