"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specwire.core import MAX_LOGPROBS
from specwire.http.bodies.generating import Body
from specwire.http.bodies.part import List, Part, Prompt, invalid


class TextPart(Part):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class Message(Part):
    """One message of a conversation, including earlier answers in the form of a response."""

    role: str
    content: str | List[TextPart]
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    annotations: list[Any] | None = None
    audio: None = None

    def as_text(self) -> dict[str, str]:
        """Role and content, parts joined."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ResponseFormat(Part):
    """Only plain text is supported."""

    type: Literal["text"]


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    object_name: ClassVar[str] = "chat.completion"

    messages: Annotated[List[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    modalities: List[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The conversation."""
        return [{"messages": [message.as_text() for message in self.messages]}]

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
