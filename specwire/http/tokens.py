"""`/tokenize` and `/detokenize`, with vLLM's bodies and answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response

from specwire.core import check_token_ids
from specwire.errors import UnsupportedError
from specwire.http.bodies.tokens import DetokenizeBody, TokenizeBody
from specwire.http.entry import Entry
from specwire.http.model import Models, ServedModel
from specwire.text.tokenizer import Tokenizer


class TokenEndpoints:
    """Encodes and decodes on a thread of its own: a long text takes a second."""

    def __init__(self, entry: Entry, models: Models) -> None:
        self._entry = entry
        self._models = models
        self._thread = ThreadPoolExecutor(1, "http-tokens")

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        model = await self._entry.model(request)
        body = await self._entry.body(request, TokenizeBody, model)
        tokenizer = await self._tokenizer(model)
        return await self._answered(lambda: _tokenized(tokenizer, body, model.info.context_len))

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        model = await self._entry.model(request)
        body = await self._entry.body(request, DetokenizeBody, model)
        tokenizer = await self._tokenizer(model)
        return await self._answered(lambda: _detokenized(tokenizer, body, model.info.vocab_size))

    async def _tokenizer(self, model: ServedModel) -> Tokenizer:
        tokenizer = await self._models.tokenizer(model)
        if tokenizer is None:
            raise UnsupportedError("model", model.name, "has no tokenizer")
        return tokenizer

    async def _answered(self, work: Callable[[], bytes]) -> Response:
        data = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return Response(data, media_type="application/json")


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody, context_len: int) -> bytes:
    if body.messages is not None:
        [conversation] = body.prompts
        token_ids = tokenizer.apply_chat_template(
            conversation["messages"],
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    else:
        special = body.add_special_tokens is not False
        token_ids = tokenizer.encode(body.prompt or "", add_special_tokens=special)
    names = tokenizer.names(token_ids) if body.return_token_strs else None
    answer = {"count": len(token_ids), "max_model_len": context_len, "tokens": token_ids}
    return json.dumps(answer | {"token_strs": names}).encode()


def _detokenized(tokenizer: Tokenizer, body: DetokenizeBody, vocab_size: int) -> bytes:
    check_token_ids("tokens", body.tokens, vocab_size)
    return json.dumps({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}).encode()
