"""Tools of a request, and which of them the model must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.http.bodies.part import JsonObject

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
