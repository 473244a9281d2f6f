"""What precedes every answer: the caller's token, and the checked body.

Bodies are read within limits of size, time and structure, and validated on another thread. Parsing a megabyte
of `[{},{},...]` takes a hundred times its size, and longer than others can wait. So bodies with more values,
containers or keys than any request needs, or a longer string, are refused while they arrive. Nesting and the
length of numbers are limited by the parser itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import pydantic
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from specwire.config.client import HttpConfig
from specwire.config.security.bearer import bearer_token
from specwire.core import MAX_LOGIT_BIASES
from specwire.http.bodies.part import Ignored, JsonObject, RequestBody, invalid
from specwire.http.errors import ApiError
from specwire.http.model import ServedModel
from specwire.rpc.wire.client import MAX_MESSAGES

_MAX_TOKEN_LEN = 4096
_SMALL_BYTES = 64 << 10
_NUM_LARGE = 4
"""Bodies over 64 KiB in memory at a time; further ones are not read meanwhile."""
_READ_S = 30.0
_SLICE_BYTES = 64 << 10
"""Scanned at a time, for about a millisecond."""
_MAX_VALUES = 1 << 17
"""In addition to the tokens of one prompt, so that several prompts may be token ids."""
_MAX_CONTAINERS = 4 * MAX_MESSAGES
"""A message is an object with a list of parts, which are objects."""
_MAX_KEYS = MAX_LOGIT_BIASES + 7 * MAX_MESSAGES
"""A message in the form of a response has seven."""
_BYTES_OF_ONE = 3
"""Most bytes that a byte of text takes in JSON: `\u00e9` is two. Control characters would take more."""
#: pydantic's errors of fields that accept their neutral value only.
_UNSUPPORTED = {"literal_error", "none_required", "too_long", "unsupported_part", "unsupported_item"}
_MAX_NAME_LEN = 64
_TOKEN_BYTES = 4
_TEXT_BYTES = 32
"""Counted for each text in addition to its bytes: messages are processed one by one, for each choice."""
Kind = TypeVar("Kind", bound=RequestBody)


class Entry:
    """Reads bodies; for one event loop."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._large = asyncio.Semaphore(_NUM_LARGE)
        self._large_by_token = WeakValueDictionary[str, asyncio.Semaphore]()
        self._thread = ThreadPoolExecutor(1, "http-body")

    async def body(self, request: Request, kind: type[Kind], model: ServedModel) -> Kind:
        """The body of a request, checked.

        Raises:
            ApiError: 415, no JSON; 413, over a limit; 408, not received in time; 400, naming the parameter;
                404, for another model.
            ClientDisconnect: the client disconnected before its end.
        """
        given = request.headers.get("content-type", "")
        # A page of another origin can send some other types without a CORS preflight.
        if given.partition(";")[0].strip().lower() != "application/json":
            message = f"Content-Type {given!r} is not application/json"
            raise ApiError(415, message, code="unsupported_media_type")
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() not in ("", "identity"):
            message = f"Content-Encoding {coding!r} is not served: send the body as it is"
            raise ApiError(415, message, code="unsupported_media_type")
        is_chunked = "transfer-encoding" in request.headers  # a length beside it says nothing
        declared = None if is_chunked else int(request.headers.get("content-length", "0"))
        self._check_size(declared or 0)
        is_small = declared is not None and declared <= _SMALL_BYTES
        async with contextlib.nullcontext() if is_small else self._place(model.token):
            try:
                async with asyncio.timeout(_READ_S):
                    scan = Scan(model.info.longest_len, self._config.max_prompt_bytes)
                    data = await self._received(request.receive, scan)
            except TimeoutError:
                message = f"the body was not complete within {_READ_S:g} s"
                raise ApiError(408, message, code="request_timeout") from None
            ignored = request.scope["specwire.ignored"]
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._thread, self._checked, kind, data, ignored)
        if body.model is not None:
            check_model(body.model, model)
        return body

    @contextlib.asynccontextmanager
    async def _place(self, token: str) -> AsyncIterator[None]:
        """Memory for a large body. Callers with one token share half of it: slow bodies of theirs do not hold
        up those of others."""
        own = self._large_by_token.setdefault(
            token, asyncio.Semaphore(_NUM_LARGE // 2 if token else _NUM_LARGE)
        )
        async with own, self._large:
            yield

    async def _received(self, receive: Receive, scan: Scan) -> bytearray:
        data = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            self._check_size(len(data) + len(chunk))
            for start in range(0, len(chunk), _SLICE_BYTES):
                scan.feed(chunk[start : start + _SLICE_BYTES])
                await asyncio.sleep(0)
            data += chunk
        return data

    def _check_size(self, num_bytes: int) -> None:
        limit = self._config.max_body_bytes
        if num_bytes > limit:
            raise ApiError(413, f"the body is over {limit} bytes", code="request_too_large")

    def _checked(self, kind: type[Kind], data: bytearray, ignored: Ignored | None) -> Kind:
        wanted = read(kind, data, ignored)
        check_size(wanted, self._config.max_prompt_bytes, self._config.max_body_bytes)
        return wanted


def token_of(request: Request) -> str:
    """The caller's bearer token, empty for none; ApiError 401 for one that cannot be valid."""
    token = bearer_token(request.headers.get("authorization", ""))
    if token and not (token.isascii() and token.isprintable() and len(token) <= _MAX_TOKEN_LEN):
        message = f"the bearer token is not ASCII text of at most {_MAX_TOKEN_LEN} characters"
        raise ApiError(401, message, code="invalid_api_key")
    return token


def check_model(name: str, model: ServedModel) -> None:
    """Refuse another model: ApiError 404."""
    if name not in model.names:
        served = ", ".join(map(repr, model.names))
        verb = "is" if len(model.names) == 1 else "are"
        message = f"The model {name!r} does not exist; {served} {verb} served."
        raise ApiError(404, message, param="model", code="model_not_found")


class Scan:
    """Counts of one body. Text that is not JSON is counted somehow, and refused by the parser later.

    Args:
        context_len: of the model, in tokens: a prompt may have as many token ids.
        max_text_bytes: of one string.
    """

    def __init__(self, context_len: int, max_text_bytes: int) -> None:
        self._max_string_bytes = _BYTES_OF_ONE * max_text_bytes
        self._limits = {
            "values": _MAX_VALUES + context_len,
            "lists and objects": _MAX_CONTAINERS,
            "keys": _MAX_KEYS,
        }
        self._counts = dict.fromkeys(self._limits, 0)
        self._in_string = False
        self._string_len = 0
        self._escape = b""

    def feed(self, data: bytes) -> None:
        """Count the next bytes, in a few ms for each MB; ApiError 413 over a limit."""
        outside, longest = self._split(data)
        if longest > self._max_string_bytes:
            raise _too_large(f"a string of over {self._max_string_bytes} bytes")
        num_containers = outside.count(b"[") + outside.count(b"{")
        self._add("values", num_containers + outside.count(b","))
        self._add("lists and objects", num_containers)
        self._add("keys", outside.count(b":"))

    def _add(self, what: str, number: int) -> None:
        self._counts[what] += number
        if self._counts[what] > self._limits[what]:
            raise _too_large(f"over {self._limits[what]} {what}")

    def _split(self, data: bytes) -> tuple[bytes, int]:
        r"""Text outside of strings, and the longest string's length; `\\` and `\"` are any two bytes."""
        data = (self._escape + data).replace(rb"\\", b"..")
        self._escape = b"\\" if data.endswith(b"\\") else b""
        pieces = data.removesuffix(b"\\").replace(rb"\"", b"..").split(b'"')
        outside = pieces[self._in_string :: 2]
        lengths = [len(piece) for piece in pieces[not self._in_string :: 2]]
        if self._in_string:
            lengths[0] += self._string_len
        self._in_string ^= len(pieces) % 2 == 0
        self._string_len = lengths[-1] if self._in_string else 0
        return b"".join(outside), max(lengths, default=0)


def _too_large(what: str) -> ApiError:
    return ApiError(413, f"the body has {what}", code="request_too_large")


def read(kind: type[Kind], data: bytes | bytearray, ignored: Ignored | None = None) -> Kind:
    """Parse and validate a body whose structure a `Scan` has found within limits; ApiError 400 names the
    parameter. Unknown ones are refused, unless `ignored` takes their names."""
    try:
        body = kind.model_validate_json(data, context=ignored)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None
    json.loads(data, object_pairs_hook=_check_names, parse_int=str, parse_float=str)
    body.check()
    return body


def _check_names(pairs: Sequence[tuple[str, Any]]) -> None:
    """Refuse a key twice, of which the last one would count."""
    if len({name for name, _ in pairs}) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        name = name[:_MAX_NAME_LEN]
        raise ApiError(400, f"{name}: is given twice", param=name, code="invalid_value")


def _refusal(error: pydantic.ValidationError) -> ApiError:
    """The first error, in OpenAI's format; of a union, that of the branch that went furthest."""
    errors = error.errors(include_url=False, include_context=False)
    place = _place(errors[0])
    first = max((each for each in errors if _place(each)[: len(place)] == place), key=_progress)
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
    value = first["input"]
    given = f"={json.dumps(value)}" if isinstance(value, int | float) else ""  # no texts of clients
    return ApiError(400, f"{param}{given}: {first['msg']}", param=param, code=code)


def _place(error: Any) -> list[str | int]:
    """Where it is, without the names of branches."""
    return [part for part in error["loc"] if isinstance(part, int) or part in JsonObject.field_names]


def _progress(error: Any) -> tuple[int, ...]:
    """How far validation came, to compare the branches of a union."""
    place = _place(error)
    is_unknown = error["type"] == "extra_forbidden"
    return len(place) + is_unknown, *(part for part in place if isinstance(part, int))


def _path(location: Iterable[str | int], *, unknown: bool) -> str:
    """`messages[0].content` from pydantic's path, which also names the branches of unions."""
    parts = list(location)
    known = [
        p
        for i, p in enumerate(parts)
        if isinstance(p, int) or p in JsonObject.field_names or (unknown and p == parts[-1])
    ]
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in known).removeprefix(".")


def check_size(body: RequestBody, max_prompt_bytes: int, max_total_bytes: int) -> None:
    """Check the size of the prompts, which are sent once for each choice: of each as text, and of all
    together. ApiError 400 if one is over its limit."""
    total = 0
    for prompt in body.prompts:
        texts = list(_texts(prompt))
        num_bytes = sum(len(text.encode()) for text in texts)
        if num_bytes > max_prompt_bytes:
            problem = f"{num_bytes} bytes are over the limit of {max_prompt_bytes} bytes"
            raise invalid(next(iter(prompt)), problem)
        total += num_bytes + _TEXT_BYTES * len(texts) + _TOKEN_BYTES * len(prompt.get("prompt_token_ids", ()))
    if total * body.num_choices > max_total_bytes:
        problem = f"choices of {total} bytes of prompts each are over the limit of {max_total_bytes} bytes"
        raise invalid("n", f"{body.num_choices} {problem}")


def _texts(value: Any) -> Iterator[str]:
    """All texts in it; the names of known fields, which are few bytes, are left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from () if name == "prompt_token_ids" else _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
