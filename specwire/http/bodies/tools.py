"""Tools of a request, and which of them the model must call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.http.bodies.part import Part

MAX_TOOLS = 128
"""As OpenAI has it."""


class Function(Part):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """The name of a function."""

    name: str


class NamedTool(Part):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


def rendered(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """As chat templates read them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]
