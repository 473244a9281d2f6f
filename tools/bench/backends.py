"""What a load is sent to: a coordinator of ours by gRPC, or any server with OpenAI's API by HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specwire.config.flags import flag_name
from specwire.core import PARAMETERS, SamplingParams
from specwire.errors import (
    ConfigError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    ResourceExhaustedError,
    ServiceUnavailableError,
    SpecwireError,
    UnauthenticatedError,
)
from tools.bench.metrics import RequestRecord
from tools.bench.prompts import Prompt

if TYPE_CHECKING:
    import httpx2

    from specwire.client.client import AsyncClient

_NOT_OF_OTHERS = (
    *("grammar", "rule", "num_draft_tokens", "max_depth", "draft", "logprobs", "prompt_logprobs"),
    *("num_beams", "length_penalty", "early_stopping", "num_return_sequences", "cache_salt", "adapter"),
)
"""Parameters of ours that OpenAI's API and vLLM's have not, or in another form."""
_MAX_ERROR_LEN = 200


@dataclass
class Coordinator:
    """A coordinator of ours, through the SDK."""

    client: AsyncClient

    async def send(
        self, prompt: Prompt, params: SamplingParams, record: RequestRecord, now_s: Callable[[], float]
    ) -> None:
        """Send one request, and fill its record while its answer arrives.

        Raises:
            SpecwireError: the request failed.
        """
        async with self.client.stream(prompt.text, params, prompt_token_ids=prompt.token_ids) as stream:
            async for chunk in stream:
                if chunk.tokens:
                    record.chunk_times_s.append(now_s())
                    record.chunk_tokens.append(len(chunk.tokens))
            done = stream.completion
        record.num_input_tokens = done.usage.prompt_tokens
        record.num_output_tokens = done.usage.completion_tokens
        record.speculation = done.speculation
        record.text = done.text


@dataclass
class OpenAIServer:
    """A server with OpenAI's API: completions, or chat completions with the prompt as the user's turn.

    Attributes:
        client: with the server's base URL and the key, if it has one.
        endpoint: path of the URL.
        model: name of the model, as the server has it.
    """

    client: httpx2.AsyncClient
    endpoint: str
    model: str
    is_chat: bool

    async def send(
        self, prompt: Prompt, params: SamplingParams, record: RequestRecord, now_s: Callable[[], float]
    ) -> None:
        """As `Coordinator.send`."""
        import httpx2

        try:
            async with self.client.stream("POST", self.endpoint, json=self._body(prompt, params)) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, answer.headers, await answer.aread())
                async for event in _events(answer):
                    try:
                        self._take(event, record, now_s)
                    except (AttributeError, LookupError, TypeError, ValueError):
                        raise _no_event(json.dumps(event)) from None
        except httpx2.TimeoutException as error:
            raise DeadlineExceededError(f"{self.client.base_url}: {type(error).__name__}") from None
        except httpx2.RequestError as error:
            problem = str(error) or type(error).__name__
            raise ServiceUnavailableError(f"{self.client.base_url}: {problem}") from None
        if not record.num_input_tokens:
            raise InternalError("the server counts no tokens: it does not know stream_options.include_usage")

    def _body(self, prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
        about = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if not self.is_chat:
            content = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
            return {**about, "prompt": content, **parameters(params)}
        if prompt.text is None:
            raise InvalidRequestError("prompt_token_ids", prompt.token_ids, "a chat takes text")
        return {**about, "messages": [{"role": "user", "content": prompt.text}], **parameters(params)}

    def _take(self, event: Mapping[str, Any], record: RequestRecord, now_s: Callable[[], float]) -> None:
        """One event: text, the count of tokens at the end, or an error in mid-stream."""
        if event.get("error"):
            raise ServiceUnavailableError(str(event["error"])[:_MAX_ERROR_LEN])
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content") if self.is_chat else choice.get("text")
            if text:
                record.chunk_times_s.append(now_s())
                record.chunk_tokens.append(1)
                record.text += text
        if usage := event.get("usage"):
            record.num_input_tokens = int(usage["prompt_tokens"])
            record.num_output_tokens = int(usage["completion_tokens"])


Backend = Coordinator | OpenAIServer
"""A server under load."""


def parameters(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults, by OpenAI's and vLLM's names.

    Raises:
        ConfigError: one of them has no name there.
    """
    found, usual = {}, SamplingParams()
    for name in PARAMETERS:
        value = getattr(params, name)
        if value != getattr(usual, name) or name in ("max_tokens", "temperature"):
            if name in _NOT_OF_OTHERS:
                raise ConfigError(f"{flag_name(name)}: OpenAI's API has no such parameter")
            found[name] = value
    return found


async def _events(answer: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON of server-sent events, up to `[DONE]`.

    Raises:
        InternalError: an event is not a JSON object.
    """
    async for line in answer.aiter_lines():
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            try:
                yield {**json.loads(data)}
            except (TypeError, ValueError, RecursionError):
                raise _no_event(data) from None


def _no_event(data: str) -> InternalError:
    return InternalError(f"not an event of OpenAI's API: {data[:_MAX_ERROR_LEN]}")


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> SpecwireError:
    """An HTTP status as the error that a coordinator would send."""
    message = f"HTTP {status}: {body.decode('utf-8', 'replace')[:_MAX_ERROR_LEN]}"
    if status in (401, 403):
        return UnauthenticatedError(message)
    if status == 429:
        after_s = headers.get("retry-after", "")
        return ResourceExhaustedError(message, int(after_s) * 1000 if after_s.isdecimal() else None)
    if status >= 500:
        return ServiceUnavailableError(message)
    return InvalidRequestError("request", message, "is refused")
