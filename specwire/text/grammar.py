"""What an output must match: a JSON schema, any JSON object, a regular expression, a choice, a grammar.

A leaf: a value that requests carry. docs/structured.md says how it takes part in the distribution.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specwire.errors import InvalidRequestError, UnsupportedError
from specwire.text.schema import check_schema
from specwire.text.unicode import HALVED, is_whole

MAX_SOURCE_LEN = 1 << 16
"""Longest source, in characters; of a choice, of all its texts together."""
LONGEST_MASK_S = 1.0
"""Of all masks of a sequence in a pass, in seconds; over it the request ends."""
MAX_CHOICES = 1024
_UNHELD = re.compile(
    r"""(?P<ignored> \\[AZzGKhHRNXQE] | (?<!^)\^ | \$(?!\Z) ) | \\.
    | \[ \^? (?: \\. | [^\]\\] )* (?: \] | \\?\Z )""",
    re.VERBOSE | re.DOTALL,
)
"""Parts of a regular expression, of which xgrammar leaves out anchors, and takes others for letters.
A class without an end, which xgrammar refuses, is read once: else each `[` of many would be one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grammar:
    """A constraint on the text of an output; exactly one of the fields.

    Raises:
        InvalidRequestError: on construction, naming the field.
        UnsupportedError: the same, for a schema with keywords that are not held exactly (`text.schema`).
    """

    json_schema: str | Mapping[str, Any] | None = None
    """JSON text that validates against this JSON schema; a mapping becomes its JSON."""
    json_object: bool = False
    """A JSON object, of any content."""
    regex: str | None = None
    """Text that this regular expression matches as a whole."""
    choice: tuple[str, ...] = ()
    """One of these texts."""
    ebnf: str | None = None
    """Text of this context-free grammar, in GBNF (the form of llama.cpp), from the rule `root`."""

    def __post_init__(self) -> None:
        given = self.json_schema
        if given is not None and not isinstance(given, str):
            object.__setattr__(self, "json_schema", _dumped(given))
        if isinstance(self.choice, str):
            raise InvalidRequestError("grammar.choice", self.choice, "must be several texts, not one")
        object.__setattr__(self, "choice", tuple(self.choice))
        kinds = [name for name in self.__slots__ if getattr(self, name) not in (None, False, ())]
        if len(kinds) != 1:
            raise InvalidRequestError(
                "grammar", ", ".join(kinds) or "nothing", f"give exactly one of {', '.join(self.__slots__)}"
            )
        _check(f"grammar.{kinds[0]}", getattr(self, kinds[0]))
        if kinds[0] == "json_schema":
            object.__setattr__(self, "json_schema", _held("grammar.json_schema", str(self.json_schema)))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in self.__slots__ if getattr(self, name) not in (None, False, ()))


def _dumped(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError("grammar.json_schema", schema, f"is not JSON: {error}") from None


def _check(name: str, value: Any) -> None:
    """Of the one field that is given: its type, its size, and that a schema is one."""
    if value is True:
        return
    texts = value if isinstance(value, tuple) else (value,)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(name, text, "must be non-empty text")
        if not is_whole(text):
            raise InvalidRequestError(name, text, HALVED)
    length = sum(map(len, texts))
    if length > MAX_SOURCE_LEN:
        raise InvalidRequestError(name, f"{length} characters", f"is over the limit of {MAX_SOURCE_LEN}")
    if name == "grammar.regex":
        for part in _UNHELD.finditer(value):
            if part["ignored"]:
                problem = f"has {part['ignored']!r} as character {part.start()}, which is not supported there"
                raise UnsupportedError(name, value, problem)
    if len(texts) > MAX_CHOICES:
        raise InvalidRequestError(name, f"{len(texts)} texts", f"is over the limit of {MAX_CHOICES}")


def _held(name: str, text: str) -> str:
    """The text of a schema, in the form that the compiler of grammars knows."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(name, text, f"is not JSON: {error}") from None
    held = check_schema(name, schema)
    if held is schema:
        return text
    text = _dumped(held)
    _check(name, text)
    return text
