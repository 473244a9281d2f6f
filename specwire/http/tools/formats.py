"""How models write tool calls in their text. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One way to write calls: a marker, then objects with a name and arguments.

    Attributes:
        marker: what a call, or a list of calls, begins with.
        is_optional: whether the text may begin with a call without the marker.
        start: after the marker.
        separator: between the calls of one list; empty if each call has its own marker.
        end: after the last call; empty if nothing is.
        arguments: key of the arguments.
    """

    name: str
    marker: str
    start: str = ""
    separator: str = ""
    end: str = ""
    arguments: str = "arguments"
    is_optional: bool = False


HERMES = Format("hermes", "<tool_call>", end="</tool_call>")
LLAMA3 = Format("llama3_json", "<|python_tag|>", separator=";", arguments="parameters", is_optional=True)
MISTRAL = Format("mistral", "[TOOL_CALLS]", start="[", separator=",", end="]")
FORMATS: Mapping[str, Format] = {each.name: each for each in (HERMES, LLAMA3, MISTRAL)}
_LLAMA3_SHAPE = '"parameters":'
_OTHER_SHAPES = ("<function=", "[ARGS]")
"""Of formats that share a marker with one of ours, and write no JSON object after it."""


def detected(template: str) -> Format | None:
    """The format that a chat template teaches its model; None if it is none of these."""
    if any(shape in template for shape in _OTHER_SHAPES):
        return None
    for each in (HERMES, MISTRAL):
        if each.marker in template:
            return each
    return LLAMA3 if LLAMA3.marker in template or _LLAMA3_SHAPE in template else None
