"""JSON to a body, the size of its prompts, and what is wrong with it, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import pydantic

from specwire.http.bodies.part import Ignored, JsonObject, RequestBody, invalid
from specwire.http.errors import ApiError

Kind = TypeVar("Kind", bound=RequestBody)

#: pydantic's errors of fields that accept their neutral value only.
_UNSUPPORTED = {"literal_error", "none_required", "too_long", "unsupported_part", "unsupported_item"}
_TOKEN_BYTES = 4
_TEXT_BYTES = 32
"""Counted for each text in addition to its bytes: messages are processed one by one, for each choice."""


def read(kind: type[Kind], data: bytes | bytearray, ignored: Ignored | None = None) -> Kind:
    """Parse and validate a body whose structure a `Scan` has found within limits; ApiError 400 names the
    parameter. Unknown ones are refused, unless `ignored` takes their names."""
    try:
        body = kind.model_validate_json(data, context=ignored)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None
    body.check()
    return body


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
