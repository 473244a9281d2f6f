"""Calls with certainty: the grammar of one call of one of the given tools. No I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specwire.errors import InvalidRequestError
from specwire.http.bodies.structured import grammar_of
from specwire.http.bodies.tools import Function
from specwire.http.tools.formats import LLAMA3, Format
from specwire.text.grammar import Grammar
from specwire.text.schema import check_schema
from specwire.text.schema_unions import mapped

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def format_of_forced(form: Format | None) -> Format:
    """How a forced call is written: one object without a marker, with the format's own key for arguments."""
    form = form or LLAMA3
    return dataclasses.replace(form, is_optional=True, start="", separator="", end="")


def grammar_of_call(functions: Sequence[Function], form: Format) -> Grammar:
    """One call whose arguments validate against the schema of its function.

    Raises:
        InvalidRequestError: parameters that are no object, or that the grammar cannot hold exactly.
    """
    keys = [f"parameters{number}" for number in range(len(functions))]
    calls = [_call(function.name, key, form) for function, key in zip(functions, keys, strict=True)]
    definitions = {
        key: _moved(_parameters(function), f"#/$defs/{key}")
        for function, key in zip(functions, keys, strict=True)
    }
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return grammar_of("tools", schema | {"$defs": definitions}, kind="json_schema")


def _call(name: str, key: str, form: Format) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, form.arguments: {"$ref": f"#/$defs/{key}"}},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _parameters(function: Function) -> dict[str, Any]:
    parameters = function.parameters or _NO_PARAMETERS
    name = f"tools.{function.name}.parameters"
    if parameters.get("type") != "object":
        raise InvalidRequestError(name, parameters.get("type"), "must be of type object")
    held: dict[str, Any] = check_schema(name, parameters)
    return held


def _moved(schema: Any, to: str) -> Any:
    """A checked schema at another place: its references are from the root."""
    if not isinstance(schema, dict):
        return schema
    own = {"$ref": to + schema["$ref"].removeprefix("#")} if "$ref" in schema else {}
    return mapped(schema, lambda each: _moved(each, to)) | own
