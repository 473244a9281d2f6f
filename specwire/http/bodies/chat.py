"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from specwire.core import MAX_LOGPROBS
from specwire.errors import UnsupportedError
from specwire.http.bodies.generating import Body
from specwire.http.bodies.message import Message, as_conversation
from specwire.http.bodies.part import List, Prompt, invalid
from specwire.http.bodies.tools import Function, NamedTool, Tool, ToolChoice, Tools, rendered
from specwire.http.tools.forced import format_of_forced, grammar_of_call
from specwire.http.tools.formats import FORMATS, Format, chosen


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[List[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: List[Literal["text"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    _format: Format | None = pydantic.PrivateAttr(None)

    @property
    def active_tools(self) -> list[Tool]:
        """Those that may be called; with `tool_choice` none the model does not learn of any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether the text is a call with certainty."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def callable_functions(self) -> list[Function]:
        """Of the tools that may be called, or of the one that must be."""
        choice = self.tool_choice
        functions = [tool.function for tool in self.active_tools]
        return [f for f in functions if not isinstance(choice, NamedTool) or f.name == choice.function.name]

    @property
    def call_format(self) -> Format:
        """How calls are written in the text; needs `prepare`."""
        if self.must_call:
            return format_of_forced(self._format)
        assert self._format is not None
        return self._format

    def prepare(self, chat_template: str, tool_call_parser: str) -> None:
        self._format = chosen(tool_call_parser, chat_template)
        if self.active_tools and not self.must_call and self._format is None:
            problem = (
                f"how this model writes calls is not known; set --tool-call-parser to {', '.join(FORMATS)}"
            )
            raise UnsupportedError("tools", f"{len(self.active_tools)} tools", problem)

    def more_params(self) -> dict[str, Any]:
        more = super().more_params()
        if self.active_tools and self.skip_special_tokens is None:
            more["skip_special_tokens"] = False  # markers of calls often are special tokens
        if self.must_call:
            more["grammar"] = grammar_of_call(self.callable_functions, self.call_format)
        return more

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The conversation, and what its template reads besides."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        conversation: Prompt = {"messages": as_conversation(self.messages)}
        if self.active_tools:
            conversation["tools"] = rendered(self.active_tools)
        return [conversation | ({"chat_template_kwargs": kwargs} if kwargs else {})]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs=true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
        self._check_tools()
        if self.reasoning_effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise invalid("reasoning_effort", "is in chat_template_kwargs too; give one of them")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise invalid("tools", f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
        if self.must_call and not self.tools:
            raise invalid("tool_choice", "needs tools")
        if self.must_call and not self.callable_functions:
            raise invalid("tool_choice.function.name", "is none of the tools")
        self._check_strict()
        if self.active_tools and self.grammar() is not None:
            problem = "do not combine with structured output, which excludes calls; tool_choice 'none' does"
            raise invalid("tools", problem)

    def _check_strict(self) -> None:
        """No grammar holds what the model calls by its own choice."""
        for i, tool in enumerate(self.active_tools):
            if tool.function.strict and not self.must_call:
                problem = "true needs tool_choice 'required' or a named function, whose arguments match"
                raise invalid(f"tools[{i}].function.strict", problem)
