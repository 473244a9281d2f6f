"""JSON to a body, and what is wrong with it, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pydantic

from specwire.http.bodies.part import Ignored, JsonObject, RequestBody
from specwire.http.errors import ApiError

Kind = TypeVar("Kind", bound=RequestBody)

#: pydantic's errors of fields that accept their neutral value only.
_UNSUPPORTED = {"literal_error", "none_required", "too_long", "unsupported_part", "unsupported_item"}


def read(kind: type[Kind], data: bytes | bytearray, ignored: Ignored | None = None) -> Kind:
    """Parse and validate a body whose structure a `Scan` has found within limits.

    Args:
        ignored: takes the names of unknown parameters; without it they are refused.

    Raises:
        ApiError: 400, naming the parameter.
    """
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
