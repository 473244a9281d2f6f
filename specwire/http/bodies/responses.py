"""The body of `/v1/responses`. What needs stored responses, and tools but functions, are refused by name."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.http.bodies.calling import Calling, FunctionChoice, FunctionTools
from specwire.http.bodies.conversation import Input, of_items
from specwire.http.bodies.generating import StreamOptions, check_stream_options
from specwire.http.bodies.part import JsonObject, Prompt
from specwire.http.bodies.structured import TextFormat
from specwire.text.grammar import Grammar


class TextConfig(JsonObject):
    """The form of the output."""

    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(JsonObject):
    """The effort is a variable of the chat template."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesBody(Calling):
    """`POST /v1/responses`."""

    path = ""
    effort_path = "reasoning.effort"
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tools: FunctionTools | None = None
    tool_choice: FunctionChoice | None = None
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
        said = [{"role": "user", "content": given}] if isinstance(given, str) else of_items(given)
        if self.instructions is not None:
            said.insert(0, {"role": "system", "content": self.instructions})
        return self.as_prompts(said)

    @property
    def names(self) -> dict[str, str]:
        own = {"max_tokens": "max_output_tokens", "grammar": "text.format"}
        return super().names | own | {"prompt": "input", "messages": "input"}

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def format(self) -> TextFormat:
        """Of the output."""
        return (self.text and self.text.format) or TextFormat(type="text")

    @cached_property
    def grammar(self) -> Grammar | None:
        return self.format.grammar()

    def own_params(self) -> dict[str, Any]:
        return super().own_params() | {"max_tokens": self.max_output_tokens}

    def check(self) -> None:
        super().check()
        check_stream_options(self.stream, self.stream_options)
