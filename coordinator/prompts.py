"""A request's prompt as token ids, checked against the target's limits. Knows no grpc."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from specwire.core import ModelInfo, SamplingParams, check_adapter, check_token_id, check_token_ids
from specwire.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from specwire.rpc.wire.client import message_from_proto, object_from_json, tools_from_json
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2

_SHORT_BYTES = 16 << 10
"""Such a prompt takes the tokenizer milliseconds; the largest one takes a second or more."""


class Encoder:
    """Encodes prompts on two threads, one of them for short prompts, which never wait behind long ones.

    The event loop runs meanwhile. A call that is cancelled before its turn is not encoded.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, "encode-short")
        self._long = ThreadPoolExecutor(1, "encode-long")

    async def token_ids(self, request: generation_pb2.GenerateRequest, most_tokens: int) -> list[int]:
        """The prompt of a request that `check_prompt` accepted.

        Raises:
            InvalidRequestError: an empty text, tools that are not JSON, or a conversation that the chat
                template refuses.
            ContextLengthError: more tokens than `most_tokens`, which the target reads.
            UnsupportedError: messages without a chat template, tools with one that does not render them.
        """
        if request.WhichOneof("prompt") == "token_ids":
            return list(request.token_ids.ids)
        thread = self._short if request.ByteSize() <= _SHORT_BYTES else self._long
        loop = asyncio.get_running_loop()
        token_ids = await loop.run_in_executor(thread, self._encode, request, most_tokens)
        _check_not_empty(token_ids)
        return token_ids

    def _encode(self, request: generation_pb2.GenerateRequest, most_tokens: int) -> list[int]:
        assert self._tokenizer is not None
        if request.WhichOneof("prompt") == "text":
            return self._tokenizer.encode(request.text, max_len=most_tokens)
        given = request.messages
        return self._tokenizer.apply_chat_template(
            [message_from_proto(i, message) for i, message in enumerate(given.messages)],
            tools=tools_from_json(given.tools),
            template_kwargs=object_from_json("chat_template_kwargs", given.template_kwargs),
            max_len=most_tokens,
        )


def check_prompt(
    request: generation_pb2.GenerateRequest,
    params: SamplingParams,
    target: ModelInfo,
    tokenizer: Tokenizer | None,
) -> None:
    """Refuse a prompt for whatever can be known without encoding it.

    Raises:
        InvalidRequestError: no prompt, no token, or one outside the vocabulary.
        ContextLengthError: the tokens do not fit.
        UnsupportedError: text for a target without a tokenizer, a conversation for an encoder-decoder.
    """
    form = request.WhichOneof("prompt")
    if form is None:
        raise InvalidRequestError("prompt", "unset", "a prompt is required")
    if form == "messages" and target.has_encoder:
        raise UnsupportedError("messages", form, f"{target.name} is an encoder-decoder: it reads one text")
    if form == "token_ids":
        _check_not_empty(request.token_ids.ids)
        fitted(params, len(request.token_ids.ids), target)
        check_token_ids("prompt_token_ids", request.token_ids.ids, target.vocab_size)
    elif tokenizer is None:
        field = "messages" if form == "messages" else "prompt"
        raise UnsupportedError(field, form, "the target has no tokenizer; give prompt_token_ids")


def _check_not_empty(token_ids: Sequence[int]) -> None:
    if not token_ids:
        raise InvalidRequestError("prompt", "empty", "at least one token is required")


def check_params(params: SamplingParams, target: ModelInfo, tokenizer: Tokenizer | None) -> None:
    """Refuse parameters that the target does not support with any prompt.

    Raises:
        InvalidRequestError: a token id outside the vocabulary, no token left that does not end the output, or
            an adapter that the target does not have.
        UnsupportedError: stop strings without a tokenizer, a grammar where the target has none or with
            `min_tokens` or `ignore_eos`, log probabilities of a prompt that an encoder reads.
    """
    check_adapter(params.adapter, target.adapters)
    check_token_ids("stop_token_ids", params.stop_token_ids, target.vocab_size)
    for token_id in params.logit_bias:
        check_token_id(f"logit_bias[{token_id}]", token_id, target.vocab_size)
    if params.min_tokens and len(_early_ends(params, target)) >= target.vocab_size:
        raise InvalidRequestError("min_tokens", params.min_tokens, "every token would end the output")
    if params.prompt_logprobs is not None and target.has_encoder:
        problem = f"{target.name} is an encoder-decoder: it has no distribution over its input"
        raise UnsupportedError("prompt_logprobs", params.prompt_logprobs, problem)
    if params.stop and tokenizer is None:
        raise UnsupportedError("stop", list(params.stop), "the target has no tokenizer; use stop_token_ids")
    if params.grammar is not None and not target.grammars:
        problem = f"{target.name} does not constrain outputs: it has no tokenizer, or no xgrammar"
        raise UnsupportedError("grammar", params.grammar.kind, problem)
    for name in ("ignore_eos", "min_tokens"):
        if params.grammar is not None and (value := getattr(params, name)):
            raise UnsupportedError(name, value, "does not combine with grammar, which says where outputs end")


def with_early_ends(params: SamplingParams, target: ModelInfo) -> SamplingParams:
    """The parameters of model services, which exclude all ends from the first `min_tokens` tokens."""
    if not params.min_tokens:
        return params
    return dataclasses.replace(params, stop_token_ids=tuple(sorted(_early_ends(params, target))))


def _early_ends(params: SamplingParams, target: ModelInfo) -> set[int]:
    return {*params.stop_token_ids, *target.eos_token_ids}


def fitted(
    params: SamplingParams, prompt_len: int, target: ModelInfo, most_tokens: int | None = None
) -> SamplingParams:
    """The parameters with a number for `max_tokens`: without one, as many as fit after the prompt.

    Args:
        prompt_len: in tokens; of an encoder-decoder, without what its decoder begins with.
        most_tokens: most that the caller may ask for; None for no limit.

    Raises:
        ContextLengthError: prompt and max_tokens do not fit into the context.
    """
    if target.has_encoder and prompt_len > target.encoder_len:
        raise ContextLengthError("prompt", f"{prompt_len} tokens", f"the encoder reads {target.encoder_len}")
    num_before = len(target.decoder_token_ids) if target.has_encoder else prompt_len
    room = target.context_len - num_before
    if (1 if params.max_tokens is None else params.max_tokens) > room or params.min_tokens > room:
        problem = f"after {num_before} tokens is over the context of {target.context_len}"
        if not target.has_encoder:
            problem = f"with a prompt of {prompt_len} tokens is over the context of {target.context_len}"
        given = "unset" if params.max_tokens is None else params.max_tokens
        raise ContextLengthError("max_tokens", given, problem)
    if params.max_tokens is not None:
        return params
    return dataclasses.replace(params, max_tokens=room if most_tokens is None else min(room, most_tokens))
