"""Request bodies of both APIs. Unknown parameters are refused.

A parameter without effect here is accepted if OpenAI's clients usually send it and it does not change the
output; one of an unsupported feature is accepted only at the value that disables the feature.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import Field

from specwire.core import MAX_LOGPROBS, Rule, SamplingParams
from specwire.errors import InvalidRequestError
from specwire.http.errors import ApiError

MAX_CHOICES = 128
"""Generations of one request, over all its prompts."""
_COMPLETION_TOKENS = 16
"""Default `max_tokens` of `/v1/completions`, as in OpenAI's."""

_SAMPLING = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "rule", "num_lists", "num_draft_tokens", "max_depth", "draft"),
    "cache_salt",
)
"""Fields with the same meaning in `SamplingParams`."""
Prompt = dict[str, Any]
"""One of `prompt`, `prompt_token_ids` and `messages`, as an argument of `AsyncClient.stream`."""
_TOKEN_BYTES = 4
_TEXT_BYTES = 32
"""Counted for each text in addition to its bytes: messages are processed one by one, for each choice."""
_MAX_ID_LEN = 10
Item = TypeVar("Item")
_List = Annotated[list[Item], Field(fail_fast=True)]
"""Validated up to the first error: one error for each item would take far more memory and time."""


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _leave_one_unknown(cls, given: Any) -> Any:
        """Reduce many unknown keys to one, which is an error enough."""
        known = cls.model_fields
        if not isinstance(given, dict) or len(given) <= len(known):
            return given
        first = next(key for key in given if key not in known)
        return {key: value for key, value in given.items() if key in known or key == first}


class StreamOptions(_Part):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(_Part):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class Message(_Part):
    """One message of a conversation, including earlier answers in the form of a response."""

    role: str
    content: str | _List[TextPart]
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
    """Only plain text is supported."""

    type: Literal["text"]


class Body(_Part):
    """Fields of both APIs."""

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
    logit_bias: dict[str, Any] | None = None
    stop: str | _List[str] | None = None
    seed: int | None = None
    # extensions with vLLM's names
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: _List[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # our extensions
    rule: Rule | None = Field(default=None, strict=False)
    num_lists: int | None = None
    num_draft_tokens: int | None = None
    max_depth: int | None = None
    draft: str | None = None
    early_stopping: bool | Literal["never"] | None = None
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
        """Whether the response is streamed."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_progress(self) -> bool:
        """Whether each chunk of a stream reports the round's draft tokens, speculation and timing."""
        return self.streams and bool(self.return_fates)

    @property
    def num_choices(self) -> int:
        """Generations for each prompt."""
        return self.n or 1

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts; a conversation is one prompt."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None for as many as fit."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report at each position; None for no log probabilities."""
        raise NotImplementedError

    def params(self) -> SamplingParams:
        """Sampling parameters of the first choice.

        Raises:
            InvalidRequestError: names the parameter and its value.
        """
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            **self._beams(),
            max_tokens=self.token_limit,
            seed=self.seed,
            top_k=max(0, self.top_k or 0),
            logit_bias=_biases(self.logit_bias or {}),
            logprobs=self.num_logprobs,
        )

    def _beams(self) -> dict[str, Any]:
        """Arguments of a beam search, whose n texts are the choices; temperature 0 goes without saying."""
        if not self.use_beam_search:
            return {}
        names = ("length_penalty", "early_stopping")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        num = {"num_beams": self.num_choices, "num_return_sequences": self.num_choices}
        return given | num | ({} if self.temperature is not None else {"temperature": 0})


class CompletionBody(Body):
    """`POST /v1/completions`."""

    object_name: ClassVar[str] = "text_completion"

    prompt: str | _List[str] | _List[int] | _List[_List[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @cached_property
    def prompts(self) -> list[Prompt]:
        """One or several, as text or token ids.

        Raises:
            ApiError: 400, none or too many.
        """
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise _invalid("prompt", "must not be empty")
        if len(given) > MAX_CHOICES:
            raise _invalid("prompt", f"has {len(given)} prompts, over {MAX_CHOICES}")
        return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in given]

    @property
    def token_limit(self) -> int | None:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    object_name: ClassVar[str] = "chat.completion"

    messages: Annotated[_List[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    modalities: _List[Literal["text"]] | None = None
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


def read(kind: type[Body], data: bytes | bytearray) -> Body:
    """Parse and validate a body whose structure a `Scan` has found within limits.

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
    """Checks that involve several fields."""
    if body.stream_options is not None and not body.streams:
        raise _invalid("stream_options", "is only for requests with stream=true")
    _check_beams(body)
    if isinstance(body, CompletionBody):
        num_choices = len(body.prompts) * body.num_choices
        if num_choices > MAX_CHOICES:
            raise _invalid("n", f"with these prompts makes {num_choices} choices, over {MAX_CHOICES}")
    elif isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise _invalid("top_logprobs", "needs logprobs=true")
        limits = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _invalid("max_tokens", "differs from max_completion_tokens; give one of them")


def _check_beams(body: Body) -> None:
    """A beam search has its texts at its end, and parameters of its own."""
    if not body.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(body, name) is not None:
                raise _invalid(name, "is only for requests with use_beam_search=true")
        return
    if body.num_choices < 2:
        raise _invalid("n", "is the number of beams with use_beam_search=true: at least 2")
    for name in ("stream", "return_fates"):
        if getattr(body, name):
            raise _invalid(name, "must be false with use_beam_search=true")


def check_size(body: Body, max_prompt_bytes: int, max_total_bytes: int) -> None:
    """Check the size of the prompts, which are sent once for each choice.

    Args:
        max_prompt_bytes: of a prompt as text.
        max_total_bytes: of all choices' prompts.

    Raises:
        ApiError: 400, over one of the limits.
    """
    total = 0
    for prompt in body.prompts:
        [(form, content)] = prompt.items()
        texts = _texts(form, content)
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > max_prompt_bytes:
            raise _invalid(form, f"{num_bytes} bytes are over the limit of {max_prompt_bytes} bytes")
        total += num_bytes + (_TEXT_BYTES * len(texts) if texts else _TOKEN_BYTES * len(content))
    if total * body.num_choices > max_total_bytes:
        problem = f"choices of {total} bytes of prompts each are over the limit of {max_total_bytes} bytes"
        raise _invalid("n", f"{body.num_choices} {problem}")


def _texts(form: str, content: Any) -> list[str]:
    if form == "messages":
        return [text for message in content for text in message.values()]
    return [content] if form == "prompt" else []


def _invalid(param: str, problem: str) -> ApiError:
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")


def _biases(given: dict[str, Any]) -> dict[int, Any]:
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_LEN):
            raise InvalidRequestError(f"logit_bias[{key[:20]!r}]", bias, "must be keyed by token ids")
    return {int(key): bias for key, bias in given.items()}


#: pydantic's errors of fields that accept their neutral value only.
_UNSUPPORTED = {"literal_error", "none_required", "too_long"}
_FIELDS = {
    name
    for kind in (CompletionBody, ChatBody, Message, TextPart, StreamOptions, ResponseFormat)
    for name in kind.model_fields
}


def _refusal(error: pydantic.ValidationError) -> ApiError:
    """The first error, in OpenAI's format."""
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
