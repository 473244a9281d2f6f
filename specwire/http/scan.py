"""Limits on the structure of JSON text, checked while it arrives, before it is parsed. No I/O.

Parsing a megabyte of `[{},{},...]` takes a hundred times its size, and longer than others can wait. So bodies
with more values, containers or keys than any request needs, or a longer string, are refused as soon as they
exceed a limit. Nesting and the length of numbers are limited by the parser itself.
"""

from __future__ import annotations

from specwire.core import MAX_LOGIT_BIASES
from specwire.http.errors import ApiError
from specwire.rpc.wire.client import MAX_MESSAGES

_MAX_VALUES = 1 << 17
"""In addition to the tokens of one prompt, so that several prompts may be token ids."""
_MAX_CONTAINERS = 4 * MAX_MESSAGES
"""A message is an object with a list of parts, which are objects."""
_MAX_KEYS = MAX_LOGIT_BIASES + 7 * MAX_MESSAGES
"""A message in the form of a response has seven."""
_BYTES_OF_ONE = 3
"""Most bytes that a byte of text takes in JSON: `\u00e9` is two. Control characters would take more."""


class Scan:
    """Counts of one body. Text that is not JSON is counted somehow, and refused by the parser later.

    Args:
        context_len: of the model, in tokens: a prompt may have as many token ids.
        max_text_bytes: of one string.
    """

    def __init__(self, context_len: int, max_text_bytes: int) -> None:
        self._max_string_bytes = _BYTES_OF_ONE * max_text_bytes
        self._limits = {
            "values": _MAX_VALUES + context_len,
            "lists and objects": _MAX_CONTAINERS,
            "keys": _MAX_KEYS,
        }
        self._counts = dict.fromkeys(self._limits, 0)
        self._in_string = False
        self._string_len = 0
        self._escape = b""

    def feed(self, data: bytes) -> None:
        """Count the next bytes, in a few ms for each MB; ApiError 413 over a limit."""
        outside, longest = self._split(data)
        if longest > self._max_string_bytes:
            raise _too_large(f"a string of over {self._max_string_bytes} bytes")
        num_containers = outside.count(b"[") + outside.count(b"{")
        self._add("values", num_containers + outside.count(b","))
        self._add("lists and objects", num_containers)
        self._add("keys", outside.count(b":"))

    def _add(self, what: str, number: int) -> None:
        self._counts[what] += number
        if self._counts[what] > self._limits[what]:
            raise _too_large(f"over {self._limits[what]} {what}")

    def _split(self, data: bytes) -> tuple[bytes, int]:
        r"""Text outside of strings, and the longest string's length; `\\` and `\"` are any two bytes."""
        data = (self._escape + data).replace(rb"\\", b"..")
        self._escape = b"\\" if data.endswith(b"\\") else b""
        pieces = data.removesuffix(b"\\").replace(rb"\"", b"..").split(b'"')
        outside = pieces[self._in_string :: 2]
        lengths = [len(piece) for piece in pieces[not self._in_string :: 2]]
        if self._in_string:
            lengths[0] += self._string_len
        self._in_string ^= len(pieces) % 2 == 0
        self._string_len = lengths[-1] if self._in_string else 0
        return b"".join(outside), max(lengths, default=0)


def _too_large(what: str) -> ApiError:
    return ApiError(413, f"the body has {what}", code="request_too_large")
