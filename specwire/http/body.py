"""What a request may say, for both APIs. Whatever is not named here is refused.

A parameter that has no effect here is accepted if OpenAI's clients send it habitually and it changes nothing
about the output; one that asks for what is not served is accepted at the value that does not ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from specwire.core import MAX_LOGPROBS, Rule, SamplingParams
from specwire.errors import InvalidRequestError
from specwire.http.errors import ApiError

MAX_CHOICES = 128
"""Generations of one request, over all its prompts."""
_COMPLETION_TOKENS = 16
"""What `/v1/completions` generates when it is not told, as in OpenAI's."""

_SAMPLING = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "rule", "num_draft_tokens", "cache_salt"),
)
"""Fields that mean the same here and there."""
Prompt = str | list[int]


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Part):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(_Part):
    """A piece of a message; only text is served."""

    type: Literal["text"]
    text: str


class Message(_Part):
    """One turn of a conversation, as clients also send back an answer that they got."""

    role: str
    content: str | list[TextPart]
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


class ResponseFormat(_Part):
    """Only plain text is served."""

    type: Literal["text"]


class Body(_Part):
    """What both APIs share."""

    object_name: ClassVar[str]

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    # as vLLM names them
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    # ours
    rule: Rule | None = Field(default=None, strict=False)
    num_draft_tokens: int | None = None
    return_fates: bool | None = None
    # without effect on the output
    user: Any = None
    metadata: Any = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes as it is made."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_progress(self) -> bool:
        """Whether a stream says with each chunk what its rounds cost."""
        return self.streams and bool(self.return_fates)

    @property
    def num_choices(self) -> int:
        """Generations for each prompt."""
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None for as many as fit."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report at each position; None for no log probabilities at all."""
        raise NotImplementedError

    def params(self, max_tokens: int, choice: int) -> SamplingParams:
        """How to sample one choice: the seed of choice i is the given one plus i.

        Raises:
            InvalidRequestError: names the parameter and its value.
        """
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            seed=None if self.seed is None else self.seed + choice,
            top_k=max(0, self.top_k or 0),
            logit_bias=_biases(self.logit_bias or {}),
            logprobs=self.num_logprobs,
        )


class CompletionBody(Body):
    """`POST /v1/completions`."""

    object_name: ClassVar[str] = "text_completion"

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[Prompt]:
        """One or several, as text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return list(prompt)

    @property
    def token_limit(self) -> int | None:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    object_name: ClassVar[str] = "chat.completion"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def read(kind: type[Body], data: bytes) -> Body:
    """A request's body, checked.

    Raises:
        ApiError: 400, naming the parameter.
    """
    try:
        body = kind.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None
    _check_together(body)
    return body


def _check_together(body: Body) -> None:
    """What no single field shows."""
    if body.stream_options is not None and not body.streams:
        raise _invalid("stream_options", "is only for requests with stream=true")
    if isinstance(body, CompletionBody):
        if not body.prompts:
            raise _invalid("prompt", "must not be empty")
        num_choices = len(body.prompts) * body.num_choices
        if num_choices > MAX_CHOICES:
            raise _invalid("n", f"with these prompts makes {num_choices} choices, over {MAX_CHOICES}")
    elif isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise _invalid("top_logprobs", "needs logprobs=true")
        limits = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _invalid("max_tokens", "differs from max_completion_tokens; give one of them")


def _invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


def _biases(given: dict[str, float]) -> dict[int, float]:
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal()):
            raise InvalidRequestError(f"logit_bias[{key!r}]", bias, "must be keyed by token ids")
    return {int(key): bias for key, bias in given.items()}


#: Errors of fields that exist for their neutral value alone.
_UNSUPPORTED = {"literal_error", "none_required", "too_long"}
_FIELDS = {
    name
    for kind in (CompletionBody, ChatBody, Message, TextPart, StreamOptions, ResponseFormat)
    for name in kind.model_fields
}


def _refusal(error: pydantic.ValidationError) -> ApiError:
    """The first thing that is wrong, in OpenAI's words."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, param = first["type"], _path(first["loc"], unknown=first["type"] == "extra_forbidden")
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        message = f"Missing required parameter: '{param}'."
        return ApiError(400, message, param=param, code="missing_required_parameter")
    if not param:
        return ApiError(400, f"the body is not a JSON object: {first['msg']}", code="invalid_json")
    code = "unsupported_value" if kind in _UNSUPPORTED else "invalid_value"
    return ApiError(400, f"{param}: {first['msg']}", param=param, code=code)


def _path(location: Iterable[str | int], *, unknown: bool) -> str:
    """`messages[0].content` from pydantic's path, which also names the branches of unions."""
    parts = list(location)
    known = [
        p for i, p in enumerate(parts) if isinstance(p, int) or p in _FIELDS or (unknown and p == parts[-1])
    ]
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in known).removeprefix(".")
