"""Schemas that outputs could not be held to are refused, naming the place."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from specwire import InvalidRequestError, UnsupportedError
from specwire.text.schema import check_schema
from tests.support.schemas import random_document


def named(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def tagged(value: Any, *, is_required: bool = True, **properties: Any) -> dict[str, Any]:
    return named(tag={"const": value}, **properties) | ({"required": ["tag"]} if is_required else {})


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, named()]}}}
"""Made of itself."""
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "integer"}}, "at #=not: is not supported"),
    ({"oneOf": [True, True]}, "at #=oneOf: is only supported of objects that a required property"),
    ({"oneOf": [tagged("a"), tagged("a")]}, "at #=oneOf: is only"),
    ({"oneOf": [tagged("a"), tagged("b", is_required=False)]}, "at #=oneOf: is only"),
    ({"oneOf": [tagged("a"), tagged("b") | {"type": ["object", "null"]}]}, "at #=oneOf: is only"),
    ({"oneOf": [tagged(1), tagged(1.0)]}, "at #=oneOf: is only"),
    ({"oneOf": [tagged("a"), {"not": True}]}, "at #/oneOf/1=not: is not supported"),
    ({"allOf": [True]}, "at #=allOf: has a branch that is not of type object"),
    ({"allOf": []}, "at #=allOf: is empty"),
    ({"allOf": [tagged("a"), tagged("b")]}, "at #=allOf: has different schemas of 'tag'"),
    ({"allOf": [tagged(1), tagged(True)]}, "at #=allOf: has different schemas of 'tag'"),
    (
        {"allOf": [tagged("a") | {"additionalProperties": False}, named(b=True)]},
        "at #=allOf: forbids 'b' of another branch by additionalProperties",
    ),
    (
        {"allOf": [named(), {"type": "object", "additionalProperties": True}]},
        "at #=allOf: has a branch with additionalProperties",
    ),
    ({"allOf": [named(a={"if": True}), named()]}, "at #/allOf/0/properties/a=if: is not supported"),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": [1]}}, "type": "object"}, "not of type"),
    (LOOP, "is nested too deeply"),
    ({"$ref": "#/default", "default": {"not": True}}, r"at #=\$ref: .* it must be in the schema"),
    ({"type": "array", "uniqueItems": True, "maxItems": 2}, "at #=uniqueItems: is only supported with"),
    ({"type": "object", "patternProperties": {}}, "at #=patternProperties: is not supported"),
    ({"type": "number", "multipleOf": 0.5}, "at #=multipleOf: needs type integer"),
    ({"type": ["number", "integer"], "multipleOf": 2}, "at #=multipleOf: is not supported for type number"),
    ({"type": "integer", "multipleOf": 1.5}, "at #=multipleOf: 1.5 is not supported: it must be whole"),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, "at #=multipleOf: is only supported up to 1024"),
    ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20_000}, "at #=multipleOf: is only"),
    ({"type": "integer", "multipleOf": 2000, "minimum": 0, "maximum": 4000}, "at #=multipleOf: is only"),
    ({"type": "number", "minimum": 0.1234567, "maximum": 0.1234568}, "at #=maximum: leaves no number"),
    ({"anyOf": []}, "at #=anyOf: is empty"),
    ({"enum": []}, "at #=enum: is empty"),
    ({"type": []}, "at #=type: is empty"),
    ({"const": [{"a": 2**63}]}, "at #=const: has 9223372036854775808, which is over 64 bits"),
    ({"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4}$"}, "at #=pattern: .* looks ahead or behind"),
    ({"type": "string", "pattern": "^[ -\u00ff]$"}, "at #=pattern: .* has a range from ASCII to beyond"),
    ({"type": "string", "format": ["date"]}, "at #=format: "),
    ({"type": "object", "properties": {"a": True}, "required": [["a"]]}, "at #=required: "),
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


def test_one_of_is_any_of_where_a_tag_tells_the_branches_apart() -> None:
    cats = {"oneOf": [tagged("black"), {"$ref": "#/$defs/white"}], "discriminator": {"propertyName": "tag"}}
    schema = {"oneOf": [cats, tagged("dog")], "$defs": {"white": tagged("white")}}
    held = check_schema("schema", schema)
    [first, second] = held["anyOf"]
    assert first == {"anyOf": [tagged("black"), {"$ref": "#/$defs/white"}]}
    assert (second, held["$defs"]) == (tagged("dog"), schema["$defs"])


def test_all_of_is_one_object() -> None:
    base = named(a={"type": "string", "title": "A"}, b={"type": "integer"}) | {"required": ["b"]}
    schema = {
        "allOf": [{"$ref": "#/$defs/base"}, named(a={"const": "x"}, c=True), named(a={"type": "string"})],
        "required": ["d"],
        "properties": {"d": {"allOf": [{"$ref": "#/$defs/base"}], "description": "only one"}},
        "$defs": {"base": base},
    }
    d = {"$ref": "#/$defs/base", "description": "only one"}
    merged = named(a={"const": "x"}, b={"type": "integer"}, c=True, d=d)
    expected = merged | {"required": ["b", "d"], "additionalProperties": False, "$defs": {"base": base}}
    assert check_schema("schema", schema) == expected


def test_a_property_that_is_required_often_is_looked_at_once() -> None:
    tag = {"type": "object", "properties": {"k": {"enum": ["a"] * 7000}}, "required": ["k"] * 7000}
    started_s = time.perf_counter()
    with pytest.raises(UnsupportedError, match="oneOf"):
        check_schema("schema", {"oneOf": [tag, {"type": "object"}]})
    assert time.perf_counter() - started_s < 0.3
