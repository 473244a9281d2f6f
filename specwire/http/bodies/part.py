"""What every JSON object of a request has in common: known fields only, in their own types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from specwire.http.errors import ApiError

Prompt = dict[str, Any]
"""One of `prompt`, `prompt_token_ids` and `messages`, and what belongs to it, as arguments of
`AsyncClient.stream`."""
Item = TypeVar("Item")
List = Annotated[list[Item], Field(fail_fast=True)]
"""Validated up to the first error: one error for each item would take far more memory and time."""

_MEDIA = {"image_url": "image", "input_image": "image", "input_audio": "audio", "video_url": "video"}
_TEXT_PARTS = ("text", "input_text", "output_text")


def _check_parts(content: Any) -> Any:
    """Refuse parts of a message that are no text by their type, which a union's errors would not name."""
    for part in content if isinstance(content, list) else ():
        kind = str(part.get("type", "text"))[:40] if isinstance(part, dict) else "text"
        if kind not in _TEXT_PARTS:
            what = f"{_MEDIA[kind]} input" if kind in _MEDIA else "this part"
            problem = "{what} is not supported (type {kind}); give text"
            raise PydanticCustomError("unsupported_part", problem, {"what": what, "kind": repr(kind)})
    return content


OnlyText = BeforeValidator(_check_parts)
Ignored = dict[str, None]
"""Unknown parameters of a request that were left out, in order; without it they are refused."""


class JsonObject(pydantic.BaseModel):
    """A JSON object of a request."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    field_names: ClassVar[set[str]] = set()
    """Of all parts."""
    _own_names: ClassVar[set[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._own_names = {field.alias or name for name, field in cls.model_fields.items()}
        JsonObject.field_names.update(cls._own_names)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_unknown(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        """Leave out unknown keys if the context says so; else all but one, which is an error enough."""
        if not isinstance(given, dict) or given.keys() <= cls._own_names:
            return given
        kept = {key: value for key, value in given.items() if key in cls._own_names}
        unknown = [key for key in given if key not in cls._own_names]
        if info.context is not None:
            info.context.update(dict.fromkeys(unknown))
            return kept
        return kept | {unknown[0]: given[unknown[0]]}


class RequestBody(JsonObject):
    """The whole body of a request; `model` may be left out where its API says so."""

    model: str | None

    @property
    def prompts(self) -> list[Prompt]:
        """What is to be encoded."""
        return []

    @property
    def num_choices(self) -> int:
        """Generations for each prompt."""
        return 1

    def check(self) -> None:
        """Check what involves several fields; ApiError 400 names one of them."""


def invalid(param: str, problem: str) -> ApiError:
    """The refusal of a parameter whose type is right."""
    return ApiError(400, f"{param}: {problem}", param=param, code="invalid_value")
