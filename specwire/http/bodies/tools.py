"""Tools of a request, which of them the model must call, and the grammar of such a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.errors import InvalidRequestError
from specwire.http.bodies.part import JsonObject
from specwire.http.bodies.structured import grammar_of
from specwire.http.tools.formats import LLAMA3, Format
from specwire.text.grammar import Grammar
from specwire.text.schema import check_schema
from specwire.text.schema_unions import mapped

MAX_TOOLS = 128
"""As OpenAI has it."""


class _Typed(JsonObject):
    """Validated first, so that a tool of another type is refused as that."""

    type: Literal["function"]


class Function(JsonObject):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Typed):
    """A tool; only functions are known."""

    function: Function


class FunctionTool(Function, _Typed):
    """A tool of `/v1/responses`, which is its function itself."""


class NamedFunction(JsonObject):
    """The name of a function."""

    name: str


class NamedTool(_Typed):
    """The one tool that must be called."""

    function: NamedFunction


class NamedFunctionTool(NamedFunction, _Typed):
    """The one tool of `/v1/responses` that must be called."""


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
FunctionTools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
_Choice = Literal["none", "auto", "required"]
ToolChoice = _Choice | NamedTool
FunctionChoice = _Choice | NamedFunctionTool


def rendered(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """As chat templates read them."""
    fields = [function.model_dump(exclude_none=True, exclude={"type"}) for function in functions]
    return [{"type": "function", "function": each} for each in fields]


def format_of_forced(form: Format | None) -> Format:
    """How a forced call is written: one object without a marker, with the format's own key for arguments."""
    form = form or LLAMA3
    return dataclasses.replace(form, is_optional=True, start="", separator="", end="")


def grammar_of_call(functions: Sequence[Function], form: Format) -> Grammar:
    """One call whose arguments validate against the schema of its function. Raises InvalidRequestError of
    parameters that are no object, or that the grammar cannot hold exactly."""
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
    parameters = function.parameters or {"type": "object", "properties": {}}
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
