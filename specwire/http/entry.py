"""What precedes every answer: who asks, of which model, and the checked body."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from specwire.config.client import HttpConfig
from specwire.config.security.bearer import bearer_token
from specwire.http.bodies import part
from specwire.http.choices import Caller
from specwire.http.errors import ApiError
from specwire.http.model import Models, ServedModel
from specwire.http.reading import BodyReader

_MAX_TOKEN_LEN = 4096
Kind = TypeVar("Kind", bound=part.RequestBody)


class Entry:
    """Admits callers and reads their bodies."""

    def __init__(self, models: Models, config: HttpConfig) -> None:
        self._models = models
        self._reader = BodyReader(config)

    async def model(self, request: Request) -> ServedModel:
        """The model that is served.

        Raises:
            ApiError: 401, a token that cannot be valid.
            UnauthenticatedError: the coordinator does not know the token.
            SpecwireError: the coordinator does not answer.
        """
        return await self._models.served(caller_of(request).token)

    async def body(self, request: Request, kind: type[Kind], model: ServedModel) -> Kind:
        """The body of a request, checked.

        Raises:
            ApiError: 404, for another model; 408, 413, 415, 400 as `BodyReader.read`.
            ClientDisconnect: the client disconnected before its end.
        """
        _check_json(request)
        ignored = request.scope["specwire.ignored"]
        body = await self._reader.read(
            kind, request.headers, request.receive, model.info.longest_len, ignored
        )
        if body.model is not None:
            check_model(body.model, model)
        return body


def caller_of(request: Request) -> Caller:
    """The caller of a request.

    Raises:
        ApiError: 401, a token that cannot be valid.
    """
    token = bearer_token(request.headers.get("authorization", ""))
    if token and not (token.isascii() and token.isprintable() and len(token) <= _MAX_TOKEN_LEN):
        message = f"the bearer token is not ASCII text of at most {_MAX_TOKEN_LEN} characters"
        raise ApiError(401, message, code="invalid_api_key")
    return Caller(token, request.scope["specwire.request_id"], request.scope["specwire.span"])


def check_model(name: str, model: ServedModel) -> None:
    """Raises:
    ApiError: 404, another model.
    """
    if name not in model.names:
        served = ", ".join(map(repr, model.names))
        verb = "is" if len(model.names) == 1 else "are"
        message = f"The model {name!r} does not exist; {served} {verb} served."
        raise ApiError(404, message, param="model", code="model_not_found")


def _check_json(request: Request) -> None:
    """Require JSON: a page of another origin can send some other types without a CORS preflight."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"Content-Type {given!r} is not application/json", code="unsupported_media_type")
