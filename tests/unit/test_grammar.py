"""The value that says what an output must match."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specwire import Grammar, InvalidRequestError, SamplingParams
from specwire.text.grammar import MAX_CHOICES, MAX_SOURCE_LEN

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "grammar=nothing: give exactly one of"),
    ({"regex": "a", "ebnf": "b"}, "grammar=regex, ebnf: give exactly one of"),
    ({"json_schema": "{"}, "grammar.json_schema={: is not JSON"),
    ({"json_schema": "[" * 20_000}, "grammar.json_schema=.*: is not JSON"),
    ({"json_schema": "3"}, "grammar.json_schema at #=3: must be a schema"),
    ({"json_schema": {"const": {1}}}, "grammar.json_schema=.*: is not JSON"),
    ({"json_schema": {"title": "a" * MAX_SOURCE_LEN}}, "grammar.json_schema=.*: is over the limit"),
    ({"regex": "a" * (MAX_SOURCE_LEN + 1)}, "grammar.regex=.*: is over the limit"),
    ({"regex": 3}, "grammar.regex=3: must be non-empty text"),
    ({"regex": "\ud800"}, "grammar.regex=.*: has half of a character"),
    ({"regex": "a$b"}, "grammar.regex=.*: has '\\$' as character 1, which is not supported there"),
    ({"regex": r"\Aab"}, r"grammar.regex=.*: has '\\\\A' as character 0"),
    ({"choice": "yes"}, "grammar.choice=yes: must be several texts"),
    ({"choice": ["yes", ""]}, "grammar.choice=: must be non-empty text"),
    ({"choice": ["yes"] * (MAX_CHOICES + 1)}, "grammar.choice=.*: is over the limit"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
def test_what_is_no_grammar_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        Grammar(**fields)


def test_a_schema_may_be_given_as_a_mapping() -> None:
    grammar = Grammar(json_schema={"type": "integer"})
    assert grammar == Grammar(json_schema='{"type": "integer"}')
    assert grammar.kind == "json_schema"


def test_parameters_take_nothing_else() -> None:
    with pytest.raises(InvalidRequestError, match="grammar=a: must be a Grammar"):
        SamplingParams(grammar="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[" * (MAX_SOURCE_LEN - 1)),
        ("regex", "[" * (MAX_SOURCE_LEN - 1) + "\\"),
        ("json_schema", json.dumps({"type": "string", "pattern": f"^{'[' * 60_000}$"})),
    ],
)
def test_a_long_expression_is_looked_through_once(kind: str, source: str) -> None:
    """Others wait meanwhile: it took more than a minute."""
    started_s = time.process_time()
    Grammar(**{kind: source})  # type: ignore[arg-type]
    assert time.process_time() - started_s < 1
