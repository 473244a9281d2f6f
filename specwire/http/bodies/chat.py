"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.core import MAX_LOGPROBS
from specwire.http.bodies.calling import Calling
from specwire.http.bodies.generating import Body
from specwire.http.bodies.message import Message, as_conversation
from specwire.http.bodies.part import List, Prompt, invalid
from specwire.http.bodies.tools import Function, NamedTool, ToolChoice, Tools, rendered


class ChatBody(Calling, Body):
    """`POST /v1/chat/completions`."""

    path = ".function"
    messages: Annotated[List[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: List[Literal["text"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def functions(self) -> list[Function]:
        return [tool.function for tool in self.tools or []]

    @property
    def chosen_name(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The conversation, and what its template reads besides."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs["reasoning_effort"] = self.reasoning_effort
        conversation: Prompt = {"messages": as_conversation(self.messages)}
        if self.active_functions:
            conversation["tools"] = rendered(self.active_functions)
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
        self.check_tools(self.grammar())
        if self.reasoning_effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise invalid("reasoning_effort", "is in chat_template_kwargs too; give one of them")
