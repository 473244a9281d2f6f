"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.core import MAX_LOGPROBS
from specwire.http.bodies.calling import Calling, ToolChoice, Tools
from specwire.http.bodies.conversation import Message, of_messages
from specwire.http.bodies.generating import Body
from specwire.http.bodies.part import List, Prompt, invalid


class ChatBody(Calling, Body):
    """`POST /v1/chat/completions`."""

    path = ".function"
    effort_path = "reasoning_effort"
    messages: Annotated[List[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    modalities: List[Literal["text"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: str | None = None

    @cached_property
    def prompts(self) -> list[Prompt]:
        return self.as_prompts(of_messages(self.messages))

    @property
    def names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().names | {"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs"}

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    def own_params(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return super().own_params() | {"max_tokens": limit, "logprobs": num_logprobs}

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs=true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise invalid("max_tokens", "differs from max_completion_tokens; give one of them")
