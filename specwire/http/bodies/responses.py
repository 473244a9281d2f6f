"""The body of `/v1/responses`. What needs stored responses, and tools but functions, are refused by name."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.http.bodies.calling import Calling
from specwire.http.bodies.items import Input, as_conversation
from specwire.http.bodies.part import JsonObject, Prompt, invalid
from specwire.http.bodies.structured import TextFormat
from specwire.http.bodies.tools import FunctionChoice, FunctionTool, FunctionTools, NamedFunctionTool


class TextConfig(JsonObject):
    """The form of the output."""

    format: TextFormat | None = None
    verbosity: None = None


class Reasoning(JsonObject):
    """The effort is a variable of the chat template."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ObfuscationOptions(JsonObject):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Calling):
    """`POST /v1/responses`."""

    path = ""
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: Reasoning | None = None
    stream_options: ObfuscationOptions | None = None
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
        said = [{"role": "user", "content": given}] if isinstance(given, str) else as_conversation(given)
        if self.instructions is not None:
            said.insert(0, {"role": "system", "content": self.instructions})
        return self.as_prompts(said)

    @property
    def functions(self) -> list[FunctionTool]:
        return self.tools or []

    @property
    def chosen_name(self) -> str | None:
        return self.tool_choice.name if isinstance(self.tool_choice, NamedFunctionTool) else None

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def format(self) -> TextFormat:
        """Of the output."""
        return (self.text and self.text.format) or TextFormat(type="text")

    def more_params(self) -> dict[str, Any]:
        return {"grammar": self.format.grammar()} | super().more_params()

    def check(self) -> None:
        self.check_tools(self.format.grammar())
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only for requests with stream=true")
        self.check_effort("reasoning.effort")
