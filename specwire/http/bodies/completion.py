"""The body of `/v1/completions`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from specwire.core import MAX_LOGPROBS
from specwire.http.bodies.generating import MAX_CHOICES, Body
from specwire.http.bodies.part import List, Prompt, invalid

_DEFAULT_TOKENS = 16
"""`max_tokens` where it is not given, as OpenAI has it."""


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: str | List[str] | List[int] | List[List[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"prompt_token_ids": "prompt"}

    @cached_property
    def prompts(self) -> list[Prompt]:
        """One or several, as text or token ids; ApiError 400 for none or too many."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise invalid("prompt", "must not be empty")
        if len(given) > MAX_CHOICES:
            raise invalid("prompt", f"has {len(given)} prompts, over {MAX_CHOICES}")
        return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in given]

    def own_params(self) -> dict[str, Any]:
        limit = _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        return super().own_params() | {"max_tokens": limit, "prompt_logprobs": self.num_prompt_logprobs}

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Of the prompt; None without `echo`, or where its text is known and nothing else is asked for."""
        if not self.echo:
            return None
        is_text = "prompt" in self.prompts[0]
        return None if self.logprobs is None and is_text and self.max_tokens != 0 else self.logprobs or 0

    def echoed(self, index: int) -> str:
        """The prompt of a choice as text; empty without `echo`, and where the answer has its tokens."""
        if not self.echo or self.num_prompt_logprobs is not None:
            return ""
        return str(self.prompts[index // self.num_choices]["prompt"])

    def check(self) -> None:
        super().check()
        if self.echo and self.use_beam_search:
            raise invalid("echo", "must be false with use_beam_search=true")
        num_choices = len(self.prompts) * self.num_choices
        if num_choices > MAX_CHOICES:
            raise invalid("n", f"with these prompts makes {num_choices} choices, over {MAX_CHOICES}")
