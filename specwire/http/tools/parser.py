"""Content and tool calls in text that arrives in pieces. No I/O.

    text      I look.\\n<tool_call>\\n{"name": "now", "arguments": {"zone": "UTC"}}\\n</tool_call>
    events    Content("I look.")  CallBegins("now")  Arguments('{"zone": "UTC"}')

Text is a call once the name of a known tool and the beginning of its arguments are read; arguments are
passed on as they arrive. Whatever only looks like a call is content, unchanged: another name, invalid JSON, a
marker alone. Where arguments stop being JSON, the rest is content. White space next to a call belongs to
neither. Each character is decided by itself, so it does not matter how the text was cut.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from specwire.http.tools.formats import Format
from specwire.http.tools.json_scan import JsonScan

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_KEYS = {"name", "arguments", "parameters", "type", "id"}
"""Of a call in another order than that of `_HEAD`, which is read as a whole."""


@dataclass(frozen=True)
class Content:
    """Text that is not part of a call."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A call of a known tool; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the arguments' JSON text."""

    text: str


Event = Content | CallBegins | Arguments


class ToolParser:
    """Reads one text.

    Args:
        names: of the known tools.
        most: calls to report; further ones are neither calls nor content. None for all.
    """

    def __init__(self, form: Format, names: Collection[str], most: int | None = None) -> None:
        self._num_calls = 0
        self._form = form
        self._names = names
        self._most = most
        self._is_left_out = False
        self._found: list[tuple[type[Event], list[str]]] = []
        self._waiting: deque[str] = deque()
        self._next: Callable[[str], None] = self._in_content
        self._held = ""
        self._object: list[str] = []
        self._scan: JsonScan | None = None
        self._expected = ""
        self._may_stream = True
        self._is_start = True
        self._follows_call = False
        self._is_open = False
        self._is_broken = False

    @property
    def is_complete(self) -> bool:
        """Whether the arguments of all calls so far are complete."""
        return not (self._is_open or self._is_broken)

    def feed(self, text: str) -> list[Event]:
        """What is certain after more text; adjacent pieces of the same kind are one event."""
        self._waiting.extend(text)
        while self._waiting:
            self._next(self._waiting.popleft())
        return self._taken()

    def flush(self) -> list[Event]:
        """At the end of the text: what was held back is content."""
        while self._held or self._object or self._waiting:
            if self._waiting:
                self._next(self._waiting.popleft())
            elif self._next == self._in_head:
                self._give_up()
            else:
                self._release(len(self._held))
        return self._taken()

    def _taken(self) -> list[Event]:
        found, self._found = self._found, []
        return [kind("".join(pieces)) for kind, pieces in found]

    def _emit(self, kind: type[Event], text: str) -> None:
        if kind is CallBegins:
            self._is_left_out = self._num_calls == self._most
            self._num_calls += not self._is_left_out
        if self._is_left_out and kind is not Content:
            return
        if self._found and self._found[-1][0] is kind and kind is not CallBegins:
            self._found[-1][1].append(text)
        else:
            self._found.append((kind, [text]))

    # --- outside of calls; held: white space, then the beginning of a marker

    def _in_content(self, char: str) -> None:
        self._held += char
        seen = self._held.lstrip()
        marker = self._form.marker
        if seen == marker:
            self._expect_object(self._form.start)
        elif seen == "{" and self._is_start and self._form.is_optional:
            self._held = self._held[:-1]
            self._expect_object("")
            self._in_head(char)
        elif not marker.startswith(seen):
            num_kept = next(
                n for n in range(len(seen) - 1, -1, -1) if marker.startswith(seen[len(seen) - n :])
            )
            self._release(len(self._held) - (1 if char.isspace() else num_kept))

    def _release(self, length: int) -> None:
        """The first characters that are held are content."""
        text, self._held = self._held[:length], self._held[length:]
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._is_start = self._is_start and text.isspace()
            self._emit(Content, text)

    # --- from a marker to the arguments; held: all of it but the object

    def _expect_object(self, start: str) -> None:
        self._expected, self._scan, self._object, self._may_stream = start, None, [], True
        self._next = self._in_head

    def _in_head(self, char: str) -> None:
        if self._scan is None:
            self._before_object(char)
            return
        self._object.append(char)
        if not self._scan.feed(char):
            self._give_up()
        elif char == "{" and self._scan.depth == 2 and self._may_stream:
            self._may_stream = False
            self._begin_call()
        elif self._scan.depth == 0:
            self._read_whole()

    def _before_object(self, char: str) -> None:
        if char == "{" and not self._expected:
            self._scan = JsonScan()
            self._scan.feed(char)
            self._object.append(char)
            return
        self._held += char
        if not char.isspace():
            if char != self._expected:
                self._give_up()
            self._expected = ""

    def _begin_call(self) -> None:
        """The first object within the object: the arguments, if the name was read before."""
        head = _HEAD.fullmatch("".join(self._object))
        if head is None:
            return
        if head[1] not in self._names:
            self._give_up()
            return
        self._accept(head[1], "{")
        self._is_open, self._next = True, self._in_arguments

    def _read_whole(self) -> None:
        """A call in another order."""
        call = _call("".join(self._object))
        if call is None or call[0] not in self._names:
            self._give_up()
            return
        self._accept(*call)
        self._next = self._after_object

    def _accept(self, name: str, arguments: str) -> None:
        self._held, self._object = "", []
        self._is_start, self._follows_call = False, True
        self._emit(CallBegins, name)
        self._emit(Arguments, arguments)

    def _give_up(self) -> None:
        """It was no call. A real one may begin at any later character."""
        text = self._held + "".join(self._object)
        self._held, self._object = text, []
        self._next = self._in_content
        num_certain = len(text) - len(text.lstrip()) + 1
        self._waiting.extendleft(reversed(text[num_certain:]))
        self._held = text[:num_certain]
        self._release(num_certain)

    # --- arguments and what follows them

    def _in_arguments(self, char: str) -> None:
        assert self._scan is not None
        if not self._scan.feed(char):
            self._is_broken, self._follows_call = True, False
            self._next = self._in_content
            self._waiting.appendleft(char)
            return
        self._emit(Arguments, char)
        if self._scan.depth == 1:
            self._is_open, self._next = False, self._after_arguments

    def _after_arguments(self, char: str) -> None:
        """Held: white space."""
        self._held += char
        if char == "}":
            self._held, self._next = "", self._after_object
        elif not char.isspace():
            self._again()

    def _after_object(self, char: str) -> None:
        """Held: white space, then the beginning of the format's end."""
        self._held += char
        seen = self._held.lstrip()
        if seen and seen == self._form.separator:
            self._expect_object("")
        elif seen and seen == self._form.end:
            self._held, self._next = "", self._in_content
        elif not self._form.end.startswith(seen):
            self._again()

    def _again(self) -> None:
        """What is held is outside of calls."""
        self._waiting.extendleft(reversed(self._held))
        self._held, self._next = "", self._in_content


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a JSON object that is a call."""
    try:
        found: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    name = found.get("name")
    if not (found.keys() <= _KEYS and isinstance(name, str) and isinstance(arguments, dict)):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
