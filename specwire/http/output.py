"""The output of `/v1/responses`, item by item, and the events of a stream that build it. No I/O."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from specwire.http.tools.parser import CallBegins, Content, Event, ToolParser

Json = dict[str, Any]


class _Message:
    """Text; its events and its JSON."""

    def __init__(self, index: int) -> None:
        self._at: Json = {"item_id": "msg_" + secrets.token_hex(16), "output_index": index}
        self._text = ""

    def begin(self) -> Iterator[Json]:
        yield _item("added", self._at, self._json("in_progress", []))
        yield {"type": "response.content_part.added", **self._at, "content_index": 0, "part": _part("")}

    def add(self, text: str) -> Json:
        self._text += text
        kind = {"type": "response.output_text.delta", "content_index": 0}
        return kind | self._at | {"delta": text, "logprobs": []}

    def end(self, *, is_cut: bool) -> tuple[list[Json], Json]:
        part, at = _part(self._text), self._at | {"content_index": 0}
        item = self._json("incomplete" if is_cut else "completed", [part])
        events: list[Json] = [
            {"type": "response.output_text.done", **at, "text": self._text, "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
        ]
        return [*events, _item("done", self._at, item)], item

    def _json(self, status: str, content: list[Json]) -> Json:
        head = {"id": self._at["item_id"], "type": "message", "role": "assistant"}
        return head | {"status": status, "content": content}


class _Call:
    """A call of a function; its events and its JSON."""

    def __init__(self, index: int, name: str) -> None:
        self._at: Json = {"item_id": "fc_" + secrets.token_hex(16), "output_index": index}
        self._call_id = "call_" + secrets.token_hex(12)
        self._name = name
        self._arguments = ""

    def begin(self) -> Iterator[Json]:
        yield _item("added", self._at, self._json("in_progress"))

    def add(self, text: str) -> Json:
        self._arguments += text
        return {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    def end(self, *, is_cut: bool) -> tuple[list[Json], Json]:
        """It is complete if its arguments are, whatever follows them."""
        item = self._json("completed" if _is_json(self._arguments) else "incomplete")
        told = {"arguments": self._arguments, "name": self._name}
        done = {"type": "response.function_call_arguments.done", **self._at, **told}
        return [done, _item("done", self._at, item)], item

    def _json(self, status: str) -> Json:
        head = {"id": self._at["item_id"], "type": "function_call", "status": status}
        return head | {"call_id": self._call_id, "name": self._name, "arguments": self._arguments}


class Output:
    """Items in the order of the text: a message wherever it is content, and each call.

    Args:
        parser: finds calls; None where the whole text is content.

    Attributes:
        items: those that have ended, as JSON.
    """

    def __init__(self, parser: ToolParser | None) -> None:
        self.items: list[Json] = []
        self._parser = parser
        self._open: _Message | _Call | None = None

    def begin(self) -> list[Json]:
        """Events of the first item, where it is certain before any text."""
        return [] if self._parser else [*self._next(_Message(0))]

    def add(self, text: str) -> list[Json]:
        if self._parser:
            return [*self._told(self._parser.feed(text))]
        return [*self._told([Content(text)])] if text else []

    def end(self, *, is_cut: bool) -> list[Json]:
        """The last events, of a text that may be cut at its limit; one without text is one empty message."""
        events = [*self._told(self._parser.flush() if self._parser else ())]
        if not self.items and self._open is None:
            events += self._next(_Message(0))
        return [*events, *self._close(is_cut=is_cut)]

    def _told(self, found: Iterable[Event]) -> Iterator[Json]:
        for each in found:
            if isinstance(each, CallBegins):
                yield from self._next(_Call(self._next_index, each.name))
                continue
            if isinstance(each, Content) and not isinstance(self._open, _Message):
                yield from self._next(_Message(self._next_index))
            assert self._open is not None
            yield self._open.add(each.text)

    @property
    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _next(self, item: _Message | _Call) -> Iterator[Json]:
        yield from self._close(is_cut=False)
        self._open = item
        yield from item.begin()

    def _close(self, *, is_cut: bool) -> list[Json]:
        if self._open is None:
            return []
        events, item = self._open.end(is_cut=is_cut)
        self._open = None
        self.items.append(item)
        return events


def _item(what: str, at: Json, item: Json) -> Json:
    return {"type": f"response.output_item.{what}", "output_index": at["output_index"], "item": item}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
