"""The body of `/v1/responses`: text in, text out. What needs stored responses or tools is refused by name."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.http.bodies.generating import Sampled
from specwire.http.bodies.part import List, OnlyText, Part, Prompt, invalid
from specwire.http.bodies.structured import TextFormat


class TextItem(Part):
    """A part of a message's content, of a request or of an earlier response."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Part):
    """A message of the input, including earlier output."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | List[TextItem], OnlyText]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def as_turn(self) -> dict[str, str]:
        """As chat templates read it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class TextConfig(Part):
    """The form of the output."""

    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(Part):
    """The effort is a variable of the chat template."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ObfuscationOptions(Part):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Sampled):
    """`POST /v1/responses`."""

    input: str | Annotated[List[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ObfuscationOptions | None = None
    text: TextConfig | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    include: Annotated[list[Any], Field(max_length=0)] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The instructions and the input, as one conversation."""
        given = self.input
        said = (
            [{"role": "user", "content": given}] if isinstance(given, str) else [m.as_turn() for m in given]
        )
        if self.instructions is not None:
            said.insert(0, {"role": "system", "content": self.instructions})
        kwargs = dict(self.chat_template_kwargs or {})
        if self.effort is not None:
            kwargs["reasoning_effort"] = self.effort
        conversation: Prompt = {"messages": said}
        return [conversation | ({"chat_template_kwargs": kwargs} if kwargs else {})]

    @property
    def effort(self) -> str | None:
        """Of the reasoning; None where the template is to choose."""
        return self.reasoning.effort if self.reasoning else None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def format(self) -> TextFormat:
        """Of the output."""
        return (self.text and self.text.format) or TextFormat(type="text")

    def more_params(self) -> dict[str, Any]:
        return {"grammar": self.format.grammar()}

    def check(self) -> None:
        if self.stream_options is not None and not self.streams:
            raise invalid("stream_options", "is only for requests with stream=true")
        if self.effort is not None and "reasoning_effort" in (self.chat_template_kwargs or {}):
            raise invalid("reasoning.effort", "is in chat_template_kwargs too; give one of them")
