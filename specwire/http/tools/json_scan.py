"""Whether text is the beginning of a JSON object, character by character. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable

_SPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_FIRST_OF_LITERAL = frozenset("-0123456789tfn")
_OF_LITERAL = frozenset("+-.0123456789Eaeflnrstu")
_MAX_LITERAL_LEN = 1024
_MAX_DEPTH = 100
"""`json` parses ten times as deep."""


class JsonScan:
    """A pushdown automaton of one JSON object.

    What follows a number or a name decides whether it is valid, so `1.` is refused one character late.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._literal = ""
        self._num_hex = 0
        self._is_key = False
        self._next: Callable[[str], bool] = self._object

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._closers)

    def feed(self, char: str) -> bool:
        """Take one more character; False if no JSON object begins so. Then the scan is over."""
        return self._next(char)

    def _object(self, char: str) -> bool:
        return char == "{" and self._open(char)

    def _value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char == '"':
            return self._begin_string(is_key=False)
        if char in _CLOSERS:
            return self._open(char)
        self._literal, self._next = char, self._in_literal
        return char in _FIRST_OF_LITERAL

    def _open(self, char: str) -> bool:
        self._closers.append(_CLOSERS[char])
        self._next = self._first_key if char == "{" else self._first_value
        return len(self._closers) <= _MAX_DEPTH

    def _first_key(self, char: str) -> bool:
        return self._close() if char == "}" else self._key(char)

    def _first_value(self, char: str) -> bool:
        return self._close() if char == "]" else self._value(char)

    def _key(self, char: str) -> bool:
        return char in _SPACE or (char == '"' and self._begin_string(is_key=True))

    def _begin_string(self, *, is_key: bool) -> bool:
        self._is_key, self._next = is_key, self._string
        return True

    def _string(self, char: str) -> bool:
        if char == '"':
            self._next = self._colon if self._is_key else self._after_value
        elif char == "\\":
            self._next = self._escape
        return char >= " "

    def _escape(self, char: str) -> bool:
        self._num_hex, self._next = (4, self._hex) if char == "u" else (0, self._string)
        return char in '"\\/bfnrtu'

    def _hex(self, char: str) -> bool:
        self._num_hex -= 1
        if not self._num_hex:
            self._next = self._string
        return char in "0123456789abcdefABCDEF"

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._next = self._value
        return char == ":" or char in _SPACE

    def _in_literal(self, char: str) -> bool:
        if char in _OF_LITERAL:
            self._literal += char
            return len(self._literal) <= _MAX_LITERAL_LEN
        self._next = self._after_value
        return _LITERAL.fullmatch(self._literal) is not None and self._after_value(char)

    def _after_value(self, char: str) -> bool:
        if char == self._closers[-1]:
            return self._close()
        if char == ",":
            self._next = self._key if self._closers[-1] == "}" else self._value
        return char == "," or char in _SPACE

    def _close(self) -> bool:
        self._closers.pop()
        self._next = self._after_value if self._closers else self._end
        return True

    def _end(self, char: str) -> bool:
        return False
