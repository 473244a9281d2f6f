"""Schemas that outputs could not be held to are refused, naming the place."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specwire import InvalidRequestError, UnsupportedError
from specwire.schema import check_schema
from tests.support.schemas import random_document

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "integer"}}, "at #=not: is not supported"),
    ({"oneOf": [True]}, "at #=oneOf: is not supported"),
    ({"allOf": [True]}, "at #=allOf: is not supported"),
    ({"type": "array", "uniqueItems": True}, "at #=uniqueItems: is not supported"),
    ({"type": "object", "patternProperties": {}}, "at #=patternProperties: is not supported"),
    ({"type": "number", "multipleOf": 0.5}, "at #=multipleOf: needs type integer"),
    ({"type": ["number", "integer"], "multipleOf": 2}, "at #=multipleOf: is not supported for type number"),
    ({"minimum": 3}, "at #=minimum: needs type integer or number"),
    ({"properties": {"a": True}}, "at #=properties: needs type object"),
    ({"anyOf": [True], "type": "object"}, "at #=type: is not supported beside anyOf"),
    ({"$ref": "#/$defs/a", "$defs": {"a": True}}, r"\$ref"),
    ({"$ref": "#/$defs/a"}, r"at #=\$ref: .* is not in the schema"),
    ({"$ref": "https://example.org/schema"}, r"at #=\$ref: .* it must be in the schema"),
    ({"type": "integer", "enum": [1, "a"]}, "at #=enum: has 'a', which is not of type 'integer'"),
    ({"type": "string", "pattern": "a+"}, r"at #=pattern: 'a\+' is not supported: it must be"),
    ({"type": "string", "pattern": '^"$'}, "at #=pattern"),
    ({"type": "string", "pattern": r"^\n$"}, "at #=pattern"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "at #=pattern: is not supported beside minLength"),
    ({"type": "string", "format": "color"}, "at #=format: 'color' is not supported"),
    ({"type": "object", "required": ["a"]}, "at #=required: 'a' is not in properties"),
    (
        {"type": "object", "properties": {"a": True}, "additionalProperties": True},
        "at #=additionalProperties: is not supported beside properties",
    ),
    ({"type": "thing"}, "at #=type: 'thing' is no type"),
    ({"type": "array", "items": {"if": True}}, "at #/items=if: is not supported"),
    ({"type": "object", "properties": {"a": {"if": True}}}, "at #/properties/a=if: is not supported"),
]
INVALID: list[tuple[Any, str]] = [
    (3, "at #=3: must be a schema"),
    ({"anyOf": {}}, "at #/anyOf={}: must be an array"),
    ({"type": "object", "properties": []}, r"at #/properties=\[\]: must be an object"),
]


@pytest.mark.parametrize(("schema", "problem"), UNSUPPORTED)
def test_what_is_not_held_exactly_is_refused(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        check_schema("schema", schema)


@pytest.mark.parametrize(("schema", "problem"), INVALID)
def test_what_is_no_schema_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        check_schema("schema", schema)


def test_deep_nesting_is_refused() -> None:
    schema: Any = True
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UnsupportedError, match="nested too deeply"):
        check_schema("schema", schema)


def test_all_else_is_taken() -> None:
    rng = random.Random(1)
    for _ in range(200):
        check_schema("schema", random_document(rng))
    annotated = {"title": "T", "description": "d", "type": "string", "default": "x", "examples": ["y"]}
    check_schema("schema", {"$ref": "#/$defs/a", "$defs": {"a": annotated}, "$schema": "x"})
