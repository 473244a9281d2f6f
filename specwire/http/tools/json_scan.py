"""Whether text is the beginning of a JSON object, character by character. No I/O."""

from __future__ import annotations

import re
from collections.abc import Generator

_SPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_FIRST_OF_LITERAL = frozenset("-0123456789tfn")
_OF_LITERAL = frozenset("+-.0123456789Eaeflnrstu")
_MAX_LITERAL_LEN = 1024
_MAX_DEPTH = 100
"""`json` parses ten times as deep."""


class JsonScan:
    """Follows one JSON object.

    What follows a number or a name decides whether it is valid, so `1.` is refused one character late.

    Attributes:
        depth: objects and lists that are open.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._reading = self._object()
        next(self._reading)

    def feed(self, char: str) -> bool:
        """Take one more character; False if no JSON object begins so. Then the scan is over."""
        try:
            self._reading.send(char)
        except (ValueError, StopIteration):
            return False
        return True

    # Each is sent the characters after those that it is given; a result is the first one that is not its own.

    def _object(self) -> Generator[None, str, None]:
        _check((yield) == "{")
        yield from self._items("}")
        yield

    def _items(self, closer: str) -> Generator[None, str, None]:
        """Those of an object or a list, and its end."""
        self.depth += 1
        _check(self.depth <= _MAX_DEPTH)
        char = yield from _visible()
        is_over = char == closer
        while not is_over:
            if closer == "}":
                _check(char == '"')
                yield from _string()
                _check((yield from _visible()) == ":")
                char = yield from _visible()
            after = yield from self._value(char)
            is_over = after == closer
            if not is_over:
                _check(after == ",")
                char = yield from _visible()
        self.depth -= 1

    def _value(self, char: str) -> Generator[None, str, str]:
        """The value that begins with this character, and white space."""
        after = " "
        if char in _CLOSERS:
            yield from self._items(_CLOSERS[char])
        elif char == '"':
            yield from _string()
        else:
            after = yield from _literal(char)
        return (yield from _visible(after))


def _check(is_valid: bool) -> None:
    if not is_valid:
        raise ValueError


def _visible(char: str = " ") -> Generator[None, str, str]:
    while char in _SPACE:
        char = yield
    return char


def _string() -> Generator[None, str, None]:
    while (char := (yield)) != '"':
        _check(char >= " ")
        if char == "\\":
            escaped = yield
            _check(escaped in '"\\/bfnrtu')
            for _ in range(4 if escaped == "u" else 0):
                _check((yield) in "0123456789abcdefABCDEF")


def _literal(char: str) -> Generator[None, str, str]:
    """A number or a name."""
    _check(char in _FIRST_OF_LITERAL)
    text = ""
    while char in _OF_LITERAL:
        text += char
        _check(len(text) <= _MAX_LITERAL_LEN)
        char = yield
    _check(_LITERAL.fullmatch(text) is not None)
    return char
