"""What bodies with tools share: the functions that the model may call, and how it writes a call.

A call that it must write has a grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from specwire.errors import InvalidRequestError, UnsupportedError
from specwire.http.bodies.generating import Sampled
from specwire.http.bodies.part import JsonObject, Prompt, invalid
from specwire.http.bodies.structured import grammar_of
from specwire.http.tools.formats import FORMATS, LLAMA3, Format, detected
from specwire.http.tools.parser import ToolParser
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

    @property
    def function(self) -> Function:
        return self


class NamedFunction(JsonObject):
    """The name of a function."""

    name: str


class NamedTool(_Typed):
    """The one tool that must be called."""

    function: NamedFunction


class NamedFunctionTool(NamedFunction, _Typed):
    """The one tool of `/v1/responses` that must be called."""

    @property
    def function(self) -> NamedFunction:
        return self


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
FunctionTools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
_Choice = Literal["none", "auto", "required"]
ToolChoice = _Choice | NamedTool
FunctionChoice = _Choice | NamedFunctionTool


class Calling(Sampled):
    """Tools of one API.

    Attributes:
        path: leads from a tool, or a choice of one, to the fields of its function.
        effort_path: the field of the effort.
    """

    path: ClassVar[str]
    effort_path: ClassVar[str]
    tools: Sequence[Tool | FunctionTool] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    _format: Format | None = pydantic.PrivateAttr(None)

    @property
    def functions(self) -> Sequence[Function]:
        """Of all tools of the request."""
        return [tool.function for tool in self.tools or ()]

    @property
    def chosen_name(self) -> str | None:
        """Of the one function that must be called; None without a choice."""
        choice = self.tool_choice
        return None if choice is None or isinstance(choice, str) else choice.function.name

    @property
    def effort(self) -> str | None:
        """Of the reasoning; None where the template is to choose."""
        raise NotImplementedError

    @property
    def names(self) -> dict[str, str]:
        tools = {"grammar.json_schema": "tools", "grammar": "tools"} if self.must_call else {}
        return super().names | tools | {"chat_template_kwargs.reasoning_effort": self.effort_path}

    def as_prompts(self, messages: list[dict[str, Any]]) -> list[Prompt]:
        """The messages, and what their template reads besides, as the one prompt."""
        whole: Prompt = {"messages": messages}
        if self.active_functions:
            whole["tools"] = [
                {"type": "function", "function": each.model_dump(exclude_none=True, exclude={"type"})}
                for each in self.active_functions
            ]
        effort = {} if self.effort is None else {"reasoning_effort": self.effort}
        kwargs = (self.chat_template_kwargs or {}) | effort
        return [whole | ({"chat_template_kwargs": kwargs} if kwargs else {})]

    @property
    def active_functions(self) -> Sequence[Function]:
        """Those that may be called; with `tool_choice` none the model does not learn of any."""
        return () if self.tool_choice == "none" else self.functions

    @property
    def must_call(self) -> bool:
        """Whether the text is a call with certainty."""
        return self.tool_choice == "required" or self.chosen_name is not None

    @property
    def callable_functions(self) -> list[Function]:
        """Those that may be called, or the one that must be."""
        return [f for f in self.active_functions if self.chosen_name in (None, f.name)]

    @property
    def call_format(self) -> Format:
        """How calls are written in the text; needs `prepare`.

        A forced call is one object without a marker, with the format's own key for arguments.
        """
        form = self._format or LLAMA3
        if self.must_call:
            return dataclasses.replace(form, is_optional=True, start="", separator="", end="")
        return form

    def parser(self) -> ToolParser:
        """Of the text that answers the request."""
        names = {function.name for function in self.callable_functions}
        return ToolParser(self.call_format, names, 1 if self.parallel_tool_calls is False else None)

    def prepare(self, chat_template: str, tool_call_parser: str) -> None:
        """Take note of how the model calls: by the parser of that name or, without one, by its chat template,
        which may be empty too. UnsupportedError if that is not known."""
        self._format = FORMATS[tool_call_parser] if tool_call_parser else detected(chat_template)
        if self.active_functions and not self.must_call and self._format is None:
            problem = (
                f"how this model writes calls is not known; set --tool-call-parser to {', '.join(FORMATS)}"
            )
            raise UnsupportedError("tools", f"{len(self.active_functions)} tools", problem)

    def own_params(self) -> dict[str, Any]:
        own = super().own_params()
        if self.active_functions and "skip_special_tokens" not in self.given:
            own["skip_special_tokens"] = False  # markers of calls often are special tokens
        if self.must_call:
            own["grammar"] = grammar_of_call(self.callable_functions, self.call_format)
        return own

    def check(self) -> None:
        super().check()
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise invalid("tools", f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
        if self.must_call and not names:
            raise invalid("tool_choice", "needs tools")
        if self.must_call and not self.callable_functions:
            raise invalid(f"tool_choice{self.path}.name", "is none of the tools")
        for i, function in enumerate(self.active_functions):
            # No grammar holds what the model calls by its own choice.
            if function.strict and not self.must_call:
                problem = "true needs tool_choice 'required' or a named function, whose arguments match"
                raise invalid(f"tools[{i}]{self.path}.strict", problem)
        if self.grammar is not None and self.active_functions:
            problem = "do not combine with structured output, which excludes calls; tool_choice 'none' does"
            raise invalid("tools", problem)
        if self.effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise invalid(self.effort_path, "is in chat_template_kwargs too; give one of them")


def grammar_of_call(functions: Sequence[Function], form: Format) -> Grammar:
    """One call whose arguments validate against the schema of its function. Raises InvalidRequestError of
    parameters that are no object, or that the grammar cannot hold exactly."""
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        place = f"#/$defs/parameters{number}"
        definitions[f"parameters{number}"] = _moved(_parameters(function), place)
        call = {
            "type": "object",
            "properties": {"name": {"const": function.name}, form.arguments: {"$ref": place}},
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        calls.append(call)
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return grammar_of("tools", schema | {"$defs": definitions}, kind="json_schema")


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
