"""Prompts and conversations to token ids, off the event loop: a long one takes the tokenizer a while."""

from __future__ import annotations

import asyncio

from specwire.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from specwire.http.body import Body, ChatBody, CompletionBody, Prompt
from specwire.http.model import ServedModel
from specwire.tokenizer import Tokenizer


async def encode(body: Body, model: ServedModel) -> list[list[int]]:
    """The prompts of a request as token ids; a conversation is one.

    Raises:
        InvalidRequestError: an empty prompt, or a conversation that the model's template refuses.
        UnsupportedError: text for a target without a tokenizer, messages for one without a template.
    """
    return await asyncio.to_thread(_encode, body, model.tokenizer)


def _encode(body: Body, tokenizer: Tokenizer | None) -> list[list[int]]:
    if isinstance(body, CompletionBody):
        return [_encode_prompt(prompt, tokenizer) for prompt in body.prompts]
    assert isinstance(body, ChatBody)
    if tokenizer is None:
        raise UnsupportedError("messages", len(body.messages), "the target has no tokenizer")
    return [tokenizer.apply_chat_template([message.as_text() for message in body.messages])]


def _encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UnsupportedError("prompt", "text", "the target has no tokenizer; give token ids")
        prompt = tokenizer.encode(prompt)
    if not prompt:
        raise InvalidRequestError("prompt", "empty", "at least one token is required")
    return prompt


def max_tokens(body: Body, prompt: list[int], context_len: int) -> int:
    """How many tokens to generate after this prompt: as many as fit, if the request leaves it open.

    Raises:
        ContextLengthError: none fits.
    """
    if body.token_limit is not None:
        return body.token_limit
    left = context_len - len(prompt)
    if left < 1:
        problem = f"are no fewer than the {context_len} of the model's context"
        raise ContextLengthError("messages", f"{len(prompt)} tokens", problem)
    return left
