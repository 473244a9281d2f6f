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
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any

from specwire.http.tools.formats import Format
from specwire.http.tools.json_scan import JsonScan
from specwire.text.unicode import is_whole

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_KEYS = {"name", "arguments", "parameters", "type", "id"}
"""Of a call in another order than that of `_HEAD`, which is read as a whole."""
_AFTER = {"type", "id"}
"""Those that may follow the arguments."""


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


class _NoCall(Exception):  # noqa: N818
    """What is held, with the object after it, only looked like a call."""


class ToolParser:
    """Reads one text.

    Args:
        names: of the known tools; without one all is content.
        most: calls to report; further ones are neither calls nor content. None for all.
    """

    def __init__(self, form: Format, names: Collection[str], most: int | None = None) -> None:
        self._form = form
        self._names = names
        self._most = most
        self._num_calls = 0
        self._num_incomplete = 0
        self._is_left_out = False
        self._found: list[tuple[type[Event], list[str]]] = []
        self._waiting: deque[str] = deque()
        self._held: list[str] = []  # character by character: white space may be long
        self._object: list[str] = []
        self._is_start = True
        self._follows_call = False
        self._reading = self._read()
        next(self._reading)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments of all calls so far are complete."""
        return self._num_incomplete == 0

    def feed(self, text: str) -> list[Event]:
        """What is certain after more text; adjacent pieces of the same kind are one event."""
        if not self._names:
            return [Content(text)] if text else []
        self._waiting.extend(text)
        while self._waiting:
            self._reading.send(self._waiting.popleft())
        return self._taken()

    def flush(self) -> list[Event]:
        """At the end of the text: what was held back is content."""
        while self._held or self._object or self._waiting:
            self._reading.send(self._waiting.popleft() if self._waiting else "")
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

    # --- the text, of which each `yield` is the next character, or nothing at its end

    def _read(self) -> Generator[None, str, None]:
        while True:
            start = yield from self._content()
            try:
                while (yield from self._call(start)) and (yield from self._goes_on()):
                    start = ""
            except _NoCall:
                self._give_up()

    def _content(self) -> Generator[None, str, str]:
        """All before a call; returns what is to come before its object.

        Held: white space, then the beginning of a marker.
        """
        marker = self._form.marker
        seen = "".join(self._held).lstrip()
        while True:
            char = yield
            self._held.extend(char)
            seen = (seen + char).lstrip()
            if seen == marker:
                return self._form.start
            if seen == "{" and self._is_start and self._form.is_optional:
                self._held.pop()
                self._waiting.appendleft(char)
                return ""
            if not char:
                self._release(len(self._held))
                seen = ""
            elif not marker.startswith(seen):
                num_kept = next(
                    n for n in range(len(seen) - 1, -1, -1) if marker.startswith(seen[len(seen) - n :])
                )
                self._release(len(self._held) - (1 if char.isspace() else num_kept))
                seen = "".join(self._held).lstrip()

    def _call(self, start: str) -> Generator[None, str, bool]:
        """From a marker to the end of the call's object, if it has one; held until it is a call."""
        while (char := (yield)) != "{" or start:
            self._held.extend(char)
            if not char.isspace():
                if not char or char != start:
                    raise _NoCall
                start = ""
        scan, has_inner = JsonScan(), False
        while True:
            self._object.append(char)
            if not char or not scan.feed(char):
                raise _NoCall
            if scan.depth == 0:
                self._accept(_call("".join(self._object)))
                return True
            if char == "{" and scan.depth == 2 and not has_inner:
                has_inner = True  # the arguments, if the name was read before
                head = _HEAD.fullmatch("".join(self._object))
                if head is not None:
                    self._accept((head[1], "{"))
                    return (yield from self._arguments(scan))
            char = yield

    def _arguments(self, scan: JsonScan) -> Generator[None, str, bool]:
        """Arguments as they arrive, and the end of the object around them."""
        self._num_incomplete += 1
        while scan.depth > 1:
            char = yield
            if not scan.feed(char):
                self._follows_call = False
                self._waiting.appendleft(char)
                return False
            self._emit(Arguments, char)
        self._num_incomplete -= 1
        while scan.depth:
            char = yield
            self._held.extend(char)
            if not char or not scan.feed(char):
                self._read_again()
                return False
        if not json.loads("{" + "".join(self._held).strip().removeprefix(",")).keys() <= _AFTER:
            self._read_again()
            return False
        self._held.clear()
        return True

    def _goes_on(self) -> Generator[None, str, bool]:
        """What follows a call; whether that is a separator.

        Held: white space, then the beginning of the format's end.
        """
        seen = ""
        while True:
            char = yield
            self._held.extend(char)
            seen = (seen + char).lstrip()
            if seen and seen == self._form.separator:
                return True
            if seen and seen == self._form.end:
                self._held.clear()
                return False
            if not char or not self._form.end.startswith(seen):
                self._read_again()
                return False

    # --- what is held

    def _release(self, length: int) -> None:
        """The first characters are content."""
        text = "".join(self._held[:length])
        del self._held[:length]
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._is_start = self._is_start and text.isspace()
            self._emit(Content, text)

    def _accept(self, call: tuple[str, str] | None) -> None:
        """All was the beginning of a call of this name and these arguments, if the name is known."""
        if call is None or call[0] not in self._names:
            raise _NoCall
        self._held, self._object = [], []
        self._is_start, self._follows_call = False, True
        self._emit(CallBegins, call[0])
        self._emit(Arguments, call[1])

    def _give_up(self) -> None:
        """It was no call. A real one may begin at any character after the first visible one."""
        text = "".join((*self._held, *self._object))
        self._object = []
        num_certain = len(text) - len(text.lstrip()) + 1
        self._waiting.extendleft(reversed(text[num_certain:]))
        self._held = [*text[:num_certain]]
        self._release(num_certain)

    def _read_again(self) -> None:
        """It is outside of calls."""
        self._waiting.extendleft(reversed(self._held))
        self._held.clear()


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a JSON object that is a call."""
    try:
        found: dict[str, Any] = json.loads(text)
        arguments = found.get("arguments", found.get("parameters", {}))
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is a number, and no JSON
    except (ValueError, RecursionError):
        return None
    name = found.get("name")
    if not (found.keys() <= _KEYS and isinstance(name, str) and isinstance(arguments, dict)):
        return None
    # Half of a character is valid JSON as long as it is escaped.
    return name, written if is_whole(written) else json.dumps(arguments)
