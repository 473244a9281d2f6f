"""What bodies with tools share: which functions the model may call, and how it writes that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pydantic

from specwire.errors import UnsupportedError
from specwire.http.bodies.generating import Sampled
from specwire.http.bodies.part import Prompt, invalid
from specwire.http.bodies.tools import Function, format_of_forced, grammar_of_call, rendered
from specwire.http.tools.formats import FORMATS, Format, detected
from specwire.text.grammar import Grammar


class Calling(Sampled):
    """Tools of one API, where `path` leads from a tool, or a choice of one, to the fields of its function."""

    path: ClassVar[str]
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    _format: Format | None = pydantic.PrivateAttr(None)

    @property
    def functions(self) -> Sequence[Function]:
        """Of all tools of the request."""
        raise NotImplementedError

    @property
    def chosen_name(self) -> str | None:
        """Of the one function that must be called; None without a choice."""
        raise NotImplementedError

    @property
    def effort(self) -> str | None:
        """Of the reasoning; None where the template is to choose."""
        raise NotImplementedError

    def as_prompts(self, messages: list[dict[str, Any]]) -> list[Prompt]:
        """The messages, and what their template reads besides, as the one prompt."""
        whole: Prompt = {"messages": messages}
        if self.active_functions:
            whole["tools"] = rendered(self.active_functions)
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
        """How calls are written in the text; needs `prepare`."""
        if self.must_call:
            return format_of_forced(self._format)
        assert self._format is not None
        return self._format

    def prepare(self, chat_template: str, tool_call_parser: str) -> None:
        """Take note of how the model calls: by the parser of that name or, without one, by its chat template,
        which may be empty too. UnsupportedError if that is not known."""
        self._format = FORMATS[tool_call_parser] if tool_call_parser else detected(chat_template)
        if self.active_functions and not self.must_call and self._format is None:
            problem = (
                f"how this model writes calls is not known; set --tool-call-parser to {', '.join(FORMATS)}"
            )
            raise UnsupportedError("tools", f"{len(self.active_functions)} tools", problem)

    def more_params(self) -> dict[str, Any]:
        more = super().more_params()
        if self.active_functions and "skip_special_tokens" not in self.given:
            more["skip_special_tokens"] = False  # markers of calls often are special tokens
        if self.must_call:
            more["grammar"] = grammar_of_call(self.callable_functions, self.call_format)
        return more

    def check_tools(self, grammar: Grammar | None) -> None:
        """Check tools, their choice, and what else the output must match."""
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
        if self.active_functions and grammar is not None:
            problem = "do not combine with structured output, which excludes calls; tool_choice 'none' does"
            raise invalid("tools", problem)

    def check_effort(self, name: str) -> None:
        """Refuse an effort that is given twice."""
        if self.effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise invalid(name, "is in chat_template_kwargs too; give one of them")
