"""The schema of calls that are forced: what it holds, and where its references lead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest

from specwire.errors import UnsupportedError
from specwire.http.bodies.calling import Function, grammar_of_call
from specwire.http.tools.formats import HERMES, LLAMA3, Format


def is_valid(form: Format, parameters: Mapping[str, Any], call: Any) -> bool:
    functions = [Function(name=name, parameters=schema) for name, schema in parameters.items()]
    schema = grammar_of_call(functions, form).json_schema
    assert isinstance(schema, str)
    return jsonschema.Draft202012Validator(json.loads(schema)).is_valid(call)


def test_definitions_of_the_same_name_are_each_tools_own() -> None:
    tools = {name: at_a_point(name) for name in ("a", "b")}
    for name, coordinate in (("a", "a"), ("b", "b"), ("a", "b")):
        point = {"x": coordinate, "next": [{"x": coordinate}]}
        call = {"name": name, "arguments": {"at": point}}
        assert is_valid(HERMES, tools, call) == (name == coordinate)


def at_a_point(coordinate: str) -> dict[str, Any]:
    next_points = {"type": "array", "items": {"$ref": "#/$defs/Point"}}
    point = {
        "type": "object",
        "properties": {"x": {"const": coordinate}, "next": next_points},
        "required": ["x"],
    }
    at = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}, "required": ["at"]}
    return at | {"$defs": {"Point": point}}


@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=lambda form: form.name)
def test_the_root_of_parameters_is_not_that_of_the_call(form: Format) -> None:
    tree = {
        "type": "object",
        "properties": {"name": {"enum": ["n"]}, "left": {"$ref": "#"}, "also": {"$ref": "#/properties/name"}},
        "additionalProperties": False,
    }
    inner = {"name": "n", "left": {"also": "n"}}
    assert is_valid(form, {"f": tree}, {"name": "f", form.arguments: inner})
    nested = {"left": {"name": "f", form.arguments: {}}}
    assert not is_valid(form, {"f": tree}, {"name": "f", form.arguments: nested})


def test_what_looks_like_a_reference_may_be_a_value_or_a_name() -> None:
    schema = {"type": "object", "properties": {"$ref": {"const": {"$ref": "#/x"}}}, "required": ["$ref"]}
    assert is_valid(HERMES, {"f": schema}, {"name": "f", "arguments": {"$ref": {"$ref": "#/x"}}})


def test_a_keyword_that_is_not_held_is_refused_where_it_stands() -> None:
    schema = {"type": "object", "minProperties": 1}
    with pytest.raises(UnsupportedError, match=r"tools\.f\.parameters at #=minProperties"):
        grammar_of_call([Function(name="f", parameters=schema)], HERMES)
