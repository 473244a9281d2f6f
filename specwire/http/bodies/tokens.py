"""The bodies of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.http.bodies.conversation import Message, of_messages
from specwire.http.bodies.part import List, Prompt, RequestBody, invalid


class TokenizeBody(RequestBody):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[List[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: Literal[False] | None = None

    @cached_property
    def prompts(self) -> list[Prompt]:
        if self.messages is not None:
            kwargs = {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}
            return [{"messages": of_messages(self.messages)} | kwargs]
        return [{"prompt": self.prompt}]

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise invalid(name, "is only for messages")
        if self.messages is not None and self.add_special_tokens:
            raise invalid("add_special_tokens", "is only for a prompt: the chat template adds its own")


class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: List[int]
