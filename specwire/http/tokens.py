"""`/tokenize` and `/detokenize`, with vLLM's bodies and answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import Response

from specwire.core import ModelInfo, check_token_ids
from specwire.errors import UnsupportedError
from specwire.http.bodies.tokens import DetokenizeBody, TokenizeBody
from specwire.http.entry import Entry, Kind
from specwire.http.model import Models
from specwire.text.tokenizer import Tokenizer


class TokenEndpoints:
    """Encodes and decodes on a thread of its own: a long text takes a second."""

    def __init__(self, entry: Entry, models: Models) -> None:
        self._entry = entry
        self._models = models
        self._thread = ThreadPoolExecutor(1, "http-tokens")

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await self._answered(request, TokenizeBody, _tokenized)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return await self._answered(request, DetokenizeBody, _detokenized)

    async def _answered(
        self, request: Request, kind: type[Kind], work: Callable[[Tokenizer, Kind, ModelInfo], bytes]
    ) -> Response:
        model = await self._entry.model(request)
        body = await self._entry.body(request, kind, model)
        tokenizer = await self._models.tokenizer(model)
        if tokenizer is None:
            raise UnsupportedError("model", model.name, "has no tokenizer")
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._thread, work, tokenizer, body, model.info)
        return Response(data, media_type="application/json")


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody, info: ModelInfo) -> bytes:
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
    answer = {"count": len(token_ids), "max_model_len": info.context_len, "tokens": token_ids}
    return json.dumps(answer | {"token_strs": names}).encode()


def _detokenized(tokenizer: Tokenizer, body: DetokenizeBody, info: ModelInfo) -> bytes:
    check_token_ids("tokens", body.tokens, info.vocab_size)
    return json.dumps({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}).encode()
