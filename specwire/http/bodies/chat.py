"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from specwire.core import MAX_LOGPROBS
from specwire.http.bodies.calling import Calling
from specwire.http.bodies.generating import Body
from specwire.http.bodies.message import Message, as_conversation
from specwire.http.bodies.part import List, Prompt, invalid
from specwire.http.bodies.tools import Function, NamedTool, ToolChoice, Tools


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
    reasoning_effort: str | None = None

    @property
    def functions(self) -> list[Function]:
        return [tool.function for tool in self.tools or []]

    @property
    def chosen_name(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @cached_property
    def prompts(self) -> list[Prompt]:
        return self.as_prompts(as_conversation(self.messages))

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

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
        self.check_effort("reasoning_effort")
