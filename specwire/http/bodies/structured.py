"""What an output must match: `response_format` as in OpenAI's API, `guided_*` and so on as in vLLM's."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from specwire.errors import InvalidRequestError
from specwire.http.bodies.part import JsonObject, List, invalid
from specwire.text.grammar import Grammar


class JsonSchema(JsonObject):
    """The schema of `json_schema`. It is held whether `strict` or not."""

    name: str
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(JsonObject):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextFormat(JsonObject):
    """`text.format` of a response: as `ResponseFormat`, with the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def grammar(self) -> Grammar | None:
        """What the output must match; None for any text. ApiError 400 of a name or a schema that is missing
        or not asked for; errors of `grammar_of`."""
        _check_fits("text.format.name", self.name, self.type)
        _check_fits("text.format.schema", self.schema_, self.type)
        if self.schema_ is not None:
            return grammar_of("text.format.schema", self.schema_)
        return Grammar(json_object=True) if self.type == "json_object" else None


class StructuredOutputs(JsonObject):
    """vLLM's newer form; exactly one of them."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: List[str] | None = None
    grammar: str | None = None


class Structured(JsonObject):
    """The fields of a request, of which at most one may ask for a grammar."""

    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @cached_property
    def asked(self) -> dict[str, Any]:
        """The field that asks for a grammar, with its value; empty if none does. ApiError 400 of several, or
        a schema that is missing or not asked for."""
        form, newer = self.response_format, self.structured_outputs or StructuredOutputs()
        schema = form.json_schema if form else None
        if form is not None:
            _check_fits("response_format.json_schema", schema, form.type)
        sources = {
            "response_format.json_schema.schema": (schema.schema_ or {}) if schema else None,
            "response_format.json_object": form is not None and form.type == "json_object",
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
            "guided_grammar": self.guided_grammar,
            "structured_outputs.json": newer.json_,
            "structured_outputs.json_object": newer.json_object,
            "structured_outputs.regex": newer.regex,
            "structured_outputs.choice": newer.choice,
            "structured_outputs.grammar": newer.grammar,
        }
        given = {name: value for name, value in sources.items() if value not in (None, False)}
        if len(given) > 1:
            first, second, *_ = given
            raise invalid(second, f"does not combine with {first}; give one of them")
        return given

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the output must match; None for any text. Errors of `asked` and `grammar_of`."""
        return next((grammar_of(name, value) for name, value in self.asked.items()), None)


def _check_fits(param: str, given: Any, kind: str) -> None:
    """Refuse a part of a schema that is missing or not asked for."""
    if (kind == "json_schema") != (given is not None):
        raise invalid(param, "is required with type 'json_schema', and belongs to no other")


_KINDS = {"schema": "json_schema", "json": "json_schema", "grammar": "ebnf"}
"""Kinds of grammar whose names in requests differ."""


def grammar_of(param: str, value: Any, kind: str = "") -> Grammar:
    """The grammar of one parameter, whose name ends with its kind if that is not given; errors name it."""
    ending = param.rpartition(".")[2].removeprefix("guided_")
    kind = kind or _KINDS.get(ending, ending)
    if value == []:
        raise InvalidRequestError(param, value, "must not be empty")
    fields: dict[str, Any] = {kind: tuple(value) if kind == "choice" else value}
    try:
        return Grammar(**fields)
    except InvalidRequestError as error:
        field = error.field.replace(f"grammar.{kind}", param, 1).replace("grammar", param, 1)
        raise type(error)(field if field.startswith(param) else param, error.value, error.problem) from None
