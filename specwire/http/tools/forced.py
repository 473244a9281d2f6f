"""Calls with certainty: the grammar of one call of one of the given tools. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specwire.errors import InvalidRequestError
from specwire.grammar import Grammar
from specwire.http.bodies.structured import grammar_of
from specwire.http.bodies.tools import Function
from specwire.http.tools.formats import LLAMA3, Format

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_DEFINITIONS = ("$defs", "definitions")


def format_of_forced(form: Format | None) -> Format:
    """How a forced call is written: one object without a marker, with the format's own key for arguments."""
    form = form or LLAMA3
    return dataclasses.replace(form, is_optional=True, start="", separator="", end="")


def grammar_of_call(functions: Sequence[Function], form: Format) -> Grammar:
    """One call whose arguments validate against the schema of its function.

    Raises:
        InvalidRequestError: parameters that are no object, or that the grammar cannot hold exactly.
    """
    definitions: dict[str, Any] = {}
    calls = [_schema(function, form, definitions) for function in functions]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return grammar_of("tools", schema | definitions, kind="json_schema")


def _schema(function: Function, form: Format, definitions: dict[str, Any]) -> dict[str, Any]:
    """Of a call; references are from the root, so definitions move there."""
    parameters = dict(function.parameters or _NO_PARAMETERS)
    name = f"tools.{function.name}.parameters"
    if parameters.get("type") != "object":
        raise InvalidRequestError(name, parameters.get("type"), "must be of type object")
    for key in _DEFINITIONS:
        known = definitions.setdefault(key, {})
        for each, schema in parameters.pop(key, {}).items():
            if known.setdefault(each, schema) != schema:
                raise InvalidRequestError(name, each, "is defined differently by another tool")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, form.arguments: parameters},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }
