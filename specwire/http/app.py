"""Routes, and what all responses have in common."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from specwire import AsyncClient, __version__
from specwire.config.client import HttpConfig
from specwire.core import ModelInfo, check_token_ids
from specwire.errors import DeadlineExceededError, ServiceUnavailableError, SpecwireError, UnsupportedError
from specwire.http import openapi, page
from specwire.http.access import NO_RESPONSE, Observed, mark_failed
from specwire.http.answers import ChatAnswer, CompletionAnswer
from specwire.http.bodies.calling import Calling
from specwire.http.bodies.chat import ChatBody
from specwire.http.bodies.completion import CompletionBody
from specwire.http.bodies.generating import Sampled
from specwire.http.bodies.responses import ResponsesBody
from specwire.http.bodies.tokens import DetokenizeBody, TokenizeBody
from specwire.http.connections import Connections
from specwire.http.entry import Entry, Kind, check_model, token_of
from specwire.http.errors import ApiError, api_error
from specwire.http.exchange import Answered, Exchange, refusal
from specwire.http.metrics import RequestCounts, passed_on
from specwire.http.model import AnswerCache, Models, ServedModel, Spell
from specwire.http.openapi import Operation
from specwire.http.origins import Origins
from specwire.http.responses import ResponsesAnswer
from specwire.telemetry.tracing import Tracing
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import generation_pb2

_STATUS_TIMEOUT_S = 2.0
Wanted = TypeVar("Wanted", bound=Sampled)


class Front:
    """The handlers of all routes, for one coordinator, and the counts of its requests."""

    def __init__(self, client: AsyncClient, config: HttpConfig, tracer: Tracing) -> None:
        self.counts = RequestCounts()
        self._started = int(time.time())
        self._tracer = tracer
        self._client = client
        self._config = config
        self._models = Models(client, config)
        self._entry = Entry(config)
        self._thread = ThreadPoolExecutor(1, "http-tokens")  # a long text takes a second
        self._statuses: AnswerCache[generation_pb2.GetStatusResponse] = AnswerCache(
            lambda token: client.get_status(timeout_s=_STATUS_TIMEOUT_S, token=token)
        )

    def app(self, connections: Connections) -> ASGIApp:
        """The ASGI application. Ids are outermost, as Starlette handles defects outside of its middleware."""
        routes = [Route(each.path, each.handler, methods=[each.method]) for each in self._operations()]
        routed = Starlette(
            routes=routes,
            exception_handlers={
                ApiError: _refuse,
                SpecwireError: _refuse,
                HTTPException: _refuse_route,
                ClientDisconnect: _leave_unanswered,
                Exception: _refuse,
            },
        )
        app = Origins(routed, self._config)
        return Observed(app, routes, connections, self.counts, self._tracer, self._config.lenient)

    def _operations(self) -> list[Operation]:
        """All that is served, in the order of the documentation."""
        get, post = "GET", "POST"
        return [
            Operation(post, "/v1/completions", self.completions, CompletionBody, openapi.COMPLETION),
            Operation(post, "/v1/chat/completions", self.chat_completions, ChatBody, openapi.COMPLETION),
            Operation(post, "/v1/responses", self.responses, ResponsesBody, openapi.RESPONSE),
            Operation(get, "/v1/models", self.list_models, answer=openapi.MODELS),
            Operation(get, "/v1/models/{name:path}", self.get_model, answer=openapi.MODEL),
            Operation(post, "/tokenize", self.tokenize, TokenizeBody, openapi.TOKENS),
            Operation(post, "/detokenize", self.detokenize, DetokenizeBody, openapi.TEXT),
            Operation(get, "/health", self.health, answer=openapi.HEALTH, is_open=True),
            Operation(get, "/ways", self.ways, answer=openapi.WAYS),
            Operation(get, "/version", self.version, answer=openapi.VERSION),
            Operation(get, "/metrics", self.metrics, content="text/plain"),
            Operation(get, "/openapi.json", self.openapi, answer=openapi.DOCUMENT),
            Operation(get, "/docs", self.docs, content="text/html"),
            Operation(get, "/", self.page, content="text/html", is_open=True),
        ]

    async def _served(self, request: Request) -> ServedModel:
        """The model that is served, for the caller; raises as `Models.served` and `token_of`."""
        return await self._models.served(token_of(request))

    async def page(self, request: Request) -> Response:
        """The demo page."""
        return HTMLResponse(page.html(), headers=page.HEADERS)

    async def health(self, request: Request) -> Response:
        """200 while the coordinator answers, even if it requires a token; needs none itself."""
        try:
            await self._statuses.get("")
        except (ServiceUnavailableError, DeadlineExceededError) as error:
            return JSONResponse({"status": "unavailable", "reason": error.status.lower()}, status_code=503)
        except SpecwireError:
            pass
        return JSONResponse({"status": "ok"})

    async def ways(self, request: Request) -> Response:
        """Ways to draft that are chosen among for requests that leave it open."""
        status = await self._statuses.get(token_of(request))
        found = sorted(status.ways, key=lambda way: -way.expected_tokens_per_s)  # the most promising first
        names = [field.name for field in generation_pb2.WayStatus.DESCRIPTOR.fields]
        ways = [{name: getattr(way, name) for name in names} for way in found]
        answer = {"why_plain": status.why_plain, "num_workers": status.num_workers, "ways": ways}
        return JSONResponse(answer)

    async def version(self, request: Request) -> Response:
        """That of this package; a caller needs a token where the coordinator requires one."""
        await self._served(request)
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """The coordinator's metrics."""
        await self._served(request)  # a caller needs the same token as for a generation
        return await passed_on(self._config.metrics_from, request.headers.get("accept", "*/*"))

    async def openapi(self, request: Request) -> Response:
        """This API as an OpenAPI document."""
        model = await self._served(request)
        return JSONResponse(openapi.described(self._operations(), model.name))

    async def docs(self, request: Request) -> Response:
        """The same as a page."""
        model = await self._served(request)
        text = openapi.page(openapi.described(self._operations(), model.name))
        return HTMLResponse(text, headers=openapi.PAGE_HEADERS)

    async def list_models(self, request: Request) -> Response:
        """The model that is served, and the same with each of its adapters."""
        model = await self._served(request)
        data = [_model(model, name, self._started) for name in model.names]
        return JSONResponse({"object": "list", "data": data})

    async def get_model(self, request: Request) -> Response:
        """One model by its name."""
        model, name = await self._served(request), request.path_params["name"]
        check_model(name, model)
        return JSONResponse(_model(model, name, self._started))

    async def completions(self, request: Request) -> Exchange:
        """Continue prompts."""
        return await self._generate(request, CompletionBody, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Exchange:
        """Continue a conversation."""
        return await self._generate(request, ChatBody, ChatAnswer)

    async def responses(self, request: Request) -> Exchange:
        """Continue a conversation, in the newer API."""
        return await self._generate(request, ResponsesBody, ResponsesAnswer)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        return await self._spelled(request, TokenizeBody, _tokenized)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        return await self._spelled(request, DetokenizeBody, _detokenized)

    async def _spelled(
        self, request: Request, kind: type[Kind], work: Callable[[Tokenizer, Kind, ModelInfo], bytes]
    ) -> Response:
        model = await self._served(request)
        body = await self._entry.body(request, kind, model)
        tokenizer = await self._models.tokenizer(model)
        if tokenizer is None:
            raise UnsupportedError("model", model.name, "has no tokenizer")
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._thread, work, tokenizer, body, model.info)
        return Response(data, media_type="application/json")

    async def _generate(
        self,
        request: Request,
        kind: type[Wanted],
        answer_kind: Callable[[Wanted, Spell | None], Answered],
    ) -> Exchange:
        """Checks the token before it reads the body."""
        model = await self._served(request)
        body = await self._entry.body(request, kind, model)
        if isinstance(body, Calling):
            body.prepare(model.info.chat_template, self._config.tool_call_parser)
        adapter = "" if body.model == model.name else body.model
        params = dataclasses.replace(body.params(**model.info.sampling), adapter=adapter)
        spell = await self._models.speller(model) if params.logprobs is not None else None
        answer = answer_kind(body, spell)
        # The choices of each prompt in turn; the seed of choice i is the given one plus i.
        seeds = [None if params.seed is None else params.seed + i for i in range(body.num_runs)]
        each = [params if seed == params.seed else dataclasses.replace(params, seed=seed) for seed in seeds]
        choices = [(prompt, params) for prompt in body.prompts for params in each]
        return Exchange(self._client, model.token, choices, answer, body)


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody, info: ModelInfo) -> bytes:
    """As vLLM answers, and so below."""
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


def _model(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    """`name` is the model's own, or that of an adapter."""
    target, draft = model.info, model.draft
    return {
        "id": name,
        "parent": None if name == model.name else model.name,
        "object": "model",
        "created": created,
        "owned_by": "specwire",
        "max_model_len": target.context_len,
        "specwire": {
            "draft": draft.name if draft else target.own_source or None,
            "least_pass_ms": target.least_pass_ms,
            "sampling": dict(target.sampling),
            "draft_shares_machine": draft is not None and draft.is_beside(target),
        },
    }


async def _refuse(request: Request, error: Exception) -> Response:
    told = api_error(error)
    mark_failed(request.scope, error, told.status)
    return refusal(told)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
    return refusal(ApiError(error.status_code, message, code=code, headers=error.headers or {}))


async def _leave_unanswered(request: Request, error: Exception) -> Response:
    return Response(status_code=NO_RESPONSE)
