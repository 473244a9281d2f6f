"""`response_format`, `guided_*` and `structured_outputs`: the OpenAI package against a target that masks."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import pydantic
import pytest

from specwire import embedded
from specwire.text import tokenizer
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, fronted

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["list", "tuple"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}


class Named(pydantic.BaseModel):
    """What both kinds inherit; pydantic writes their properties out."""

    name: str = pydantic.Field(max_length=4)


class Cat(Named):
    kind: Literal["cat"]
    lives: int = pydantic.Field(ge=1, le=9)


class Dog(Named):
    kind: Literal["dog", "wolf"]


class Owner(pydantic.BaseModel):
    """With a discriminated union: `oneOf` beside `discriminator`."""

    pet: Cat | Dog = pydantic.Field(discriminator="kind")


UNION = Owner.model_json_schema()
INHERITED: dict[str, Any] = {
    "allOf": [{"$ref": "#/$defs/Named"}, {"$ref": "#/$defs/Aged"}],
    "properties": {"is_wild": {"type": "boolean"}},
    "required": ["is_wild"],
    "$defs": {
        "Named": Named.model_json_schema(),
        "Aged": {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]},
    },
}
"""As OpenAPI writes inheritance."""
SAID: Any = [{"role": "user", "content": "Describe a container."}]
here = entered(lambda: fronted(embedded.TARGET_DIR, embedded.DRAFT_DIR))


@pytest.mark.parametrize(
    ("schema", "stream"),
    [(SCHEMA, False), (UNION, False), (INHERITED, True)],
    ids=["plain", "union", "inherited"],
)
def test_a_schema_holds(here: Fronted, schema: dict[str, Any], stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    texts = set()
    for seed in range(2):
        answer: Any = here.openai.chat.completions.create(
            model=here.model, messages=SAID, response_format=form, stream=stream, seed=seed, max_tokens=120
        )
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            text, reason = "".join(each.delta.content or "" for each in choices), choices[-1].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert reason == "stop"
        jsonschema.validate(json.loads(text), schema)
        texts.add(text)
    assert len(texts) > 1


def test_a_string_of_limited_length_has_no_control_characters(here: Fronted) -> None:
    """However likely they are: JSON has them as escapes alone."""
    loaded = tokenizer.load(embedded.TARGET_DIR)
    assert loaded is not None
    [tab] = loaded.encode("\t", add_special_tokens=False)
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    answer = here.openai.chat.completions.create(
        model=here.model, messages=SAID, response_format=form, logit_bias={str(tab): 100}, max_tokens=120
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def test_a_response_in_a_schema(here: Fronted) -> None:
    form: Any = {"type": "json_schema", "name": "it", "schema": SCHEMA}
    done = here.openai.responses.create(
        model=here.model, input="Describe a container.", text={"format": form}, max_output_tokens=120
    )
    jsonschema.validate(json.loads(done.output_text), SCHEMA)
    assert done.text
    assert done.text.format
    assert done.text.format.type == "json_schema"


def test_any_object(here: Fronted) -> None:
    answer = here.openai.chat.completions.create(
        model=here.model, messages=SAID, response_format={"type": "json_object"}, seed=1, max_tokens=60
    )
    [choice] = answer.choices
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-f]"}, "[0-9]{3}-[a-f]"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "<" [xyz] ">"'}, "<[xyz]>"),
        ({"guided_json": {"const": 7}}, "7"),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, "1|2"),
        ({"structured_outputs": {"choice": ["a b"]}}, "a b"),
        ({"structured_outputs": {"regex": "u+"}}, "u+"),
        ({"structured_outputs": {"grammar": 'root ::= "q"'}}, "q"),
        ({"structured_outputs": {"json_object": False}, "response_format": {"type": "text"}}, "(?s).*"),
    ],
)
def test_vllms_names(here: Fronted, asked: dict[str, Any], pattern: str) -> None:
    answer = here.openai.completions.create(
        model=here.model, prompt="x = ", max_tokens=24, n=2, seed=3, temperature=0.8, extra_body=asked
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "stop" or "*" in pattern or "+" in pattern
        assert re.fullmatch(pattern, choice.text), choice.text
