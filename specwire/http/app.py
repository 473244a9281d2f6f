"""Routes, and what all responses have in common."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specwire import AsyncClient
from specwire.config.client import HttpConfig
from specwire.errors import DeadlineExceededError, ServiceUnavailableError, SpecwireError
from specwire.http import page, spans
from specwire.http.access import AccessEntry
from specwire.http.answer_cache import AnswerCache
from specwire.http.answers import answer
from specwire.http.body import Body, ChatBody, CompletionBody
from specwire.http.choices import Caller, Choice
from specwire.http.errors import ApiError
from specwire.http.exchange import Exchange, refusal
from specwire.http.model import Models, ServedModel
from specwire.http.origins import Origins
from specwire.http.reading import BodyReader
from specwire.http.spans import Traced
from specwire.security.bearer import bearer_token
from specwire.telemetry.propagation import REQUEST_ID
from specwire.telemetry.tracing import Tracing

_HEALTH_TIMEOUT_S = 2.0
_MAX_TOKEN_LEN = 4096


class Front:
    """The handlers of all routes, for one coordinator."""

    def __init__(self, client: AsyncClient, config: HttpConfig, tracer: Tracing) -> None:
        self._tracer = tracer
        self._client = client
        self._config = config
        self._models = Models(client, config)
        self._reader = BodyReader(config)
        self._statuses = AnswerCache(self._ask_status)

    def app(self) -> ASGIApp:
        """The ASGI application. Ids are outermost, as Starlette handles defects outside of its middleware."""
        routes = self._routes()
        traced = Traced(_Guarded(routes, Origins(self._config)), self._tracer, routes.routes)
        return _RequestIds(traced)

    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self.page, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/v1/models", self.list_models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.get_model, methods=["GET"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _refuse,
                SpecwireError: _refuse,
                HTTPException: _refuse_route,
                ClientDisconnect: _leave,
                Exception: _refuse,
            },
        )

    async def page(self, request: Request) -> Response:
        """The demo page."""
        return HTMLResponse(page.html(), headers=page.HEADERS)

    async def health(self, request: Request) -> Response:
        """200 while the coordinator answers, even if it requires a token; needs none itself."""
        try:
            await self._statuses.get(None)
        except (ServiceUnavailableError, DeadlineExceededError) as error:
            return JSONResponse({"status": "unavailable", "reason": error.status.lower()}, status_code=503)
        except SpecwireError:
            pass
        return JSONResponse({"status": "ok"})

    async def _ask_status(self, _: None) -> None:
        await self._client.get_status(timeout_s=_HEALTH_TIMEOUT_S)

    async def list_models(self, request: Request) -> Response:
        """The one model that is served."""
        model = await self._models.served(_caller(request).token)
        return JSONResponse({"object": "list", "data": [_model(model)]})

    async def get_model(self, request: Request) -> Response:
        """One model by its name."""
        model = await self._models.served(_caller(request).token)
        _check_model(request.path_params["name"], model)
        return JSONResponse(_model(model))

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        return await self._generate(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._generate(request, ChatBody)

    async def _generate(self, request: Request, kind: type[Body]) -> Response:
        """Checks the token before it reads the body."""
        caller = _caller(request)
        model = await self._models.served(caller.token)
        _check_json(request)
        wanted = await self._reader.read(kind, request.headers, request.receive, model.info.longest_len)
        _check_model(wanted.model, model)
        spell = await self._models.speller(model) if wanted.num_logprobs is not None else None
        return Exchange(self._client, _choices(wanted), caller, answer(wanted, model.name, spell), wanted)


def _choices(wanted: Body) -> list[Choice]:
    """The choices of each prompt in turn; the seed of choice i is the given one plus i."""
    params = wanted.params()
    if wanted.use_beam_search:  # one search has all choices of its prompt
        return [Choice(prompt, params) for prompt in wanted.prompts]
    seeds = [None if params.seed is None else params.seed + i for i in range(wanted.num_choices)]
    each = [params if seed == params.seed else dataclasses.replace(params, seed=seed) for seed in seeds]
    return [Choice(prompt, params) for prompt in wanted.prompts for params in each]


def _caller(request: Request) -> Caller:
    """The caller of a request.

    Raises:
        ApiError: 401, a token that cannot be valid.
    """
    token = bearer_token(request.headers.get("authorization", ""))
    if token and not (token.isascii() and token.isprintable() and len(token) <= _MAX_TOKEN_LEN):
        message = f"the bearer token is not ASCII text of at most {_MAX_TOKEN_LEN} characters"
        raise ApiError(401, message, code="invalid_api_key")
    return Caller(token, request.scope["specwire.request_id"], request.scope["specwire.span"])


def _check_json(request: Request) -> None:
    """Require JSON: a page of another origin can send some other types without a CORS preflight."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"Content-Type {given!r} is not application/json", code="unsupported_media_type")


def _check_model(name: str, model: ServedModel) -> None:
    if name != model.name:
        message = f"The model {name!r} does not exist; {model.name!r} is served."
        raise ApiError(404, message, param="model", code="model_not_found")


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "specwire",
        "max_model_len": model.info.context_len,
    }


async def _refuse(request: Request, error: Exception) -> Response:
    spans.mark(request.scope["specwire.span"], error)
    return refusal(error)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
    return refusal(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _leave(request: Request, error: Exception) -> Response:
    """The client has disconnected: the response is not read."""
    return Response(status_code=499)


class _Guarded:
    """Refuses requests for other hosts and from pages of other origins, on any route."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._origins.check(Headers(scope=scope))
        except ApiError as error:
            await refusal(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _RequestIds:
    """Gives every response an `x-request-id`, the client's own if it is valid, and logs the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else "req-" + secrets.token_hex(12)

        scope["specwire.request_id"] = request_id

        entry = AccessEntry(scope, request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            entry.see(message)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            entry.log()
