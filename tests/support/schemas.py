"""Random JSON schemas of every keyword that outputs are held to."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ("^[a-z]{2,5}$", "^(yes|no)$", "^[A-Z][a-z]*-[0-9]{1,3}$", r"^\d{3}\.\w{1,4}$")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid")
_VALUES = ("a", 'quo"te', "new\nline", "é", 3, -1.5, None, True, [1, "x"], {"k": [None]})
_MAX_DEPTH = 3


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """One schema; those of its parts are drawn alike, less deep."""
    simple = [_string, _integer, _number, _enum, _const, _plain]
    kinds = (
        simple
        if depth >= _MAX_DEPTH
        else [*simple, _object, _object, _object, _array, _any_of, _one_of, _all_of]
    )
    return rng.choice(kinds)(rng, depth)


def random_document(rng: random.Random) -> Schema:
    """A schema as requests have it: an object, some parts of which it defines by name."""
    schema = _object(rng, 0)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": random_schema(rng, _MAX_DEPTH - 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def _string(rng: random.Random, depth: int) -> Schema:
    shape = rng.randrange(4)
    if shape == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if shape == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    least = rng.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(12)}


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-300, 300)
    bounds: list[Schema] = [
        {"minimum": least, "maximum": least + rng.randrange(1000)},
        {"exclusiveMinimum": least, "exclusiveMaximum": least + rng.randint(2, 1000)},
        {"minimum": least * 5, "maximum": least * 5 + 50, "multipleOf": 5},
    ]
    return {"type": "integer", **rng.choice(bounds)}


def _number(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-40, 40) / 4
    return {"type": "number", "minimum": least, "maximum": least + rng.randint(1, 40) / 4}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(_VALUES, rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(_VALUES)}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["name", "age", "a b", "ü", 'q"', "x", "tags", "_id"], rng.randint(1, 4))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    items: Schema = {"type": "array", "items": random_schema(rng, depth + 1)}
    if rng.random() < 0.3:
        items["prefixItems"] = [random_schema(rng, depth + 1) for _ in range(2)]
        least += 2
    return {**items, "minItems": least, "maxItems": least + rng.randrange(3)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int) -> Schema:
    branches = [_object(rng, depth + 1) for _ in range(rng.randint(2, 3))]
    for i, branch in enumerate(branches):
        branch["properties"]["kind"] = {"const": f"k{i}"} if i else {"enum": ["k", "n"]}
        branch["required"].append("kind")
    return {"oneOf": branches}


def _all_of(rng: random.Random, depth: int) -> Schema:
    """As inheritance writes it: no branch is closed, and a constant narrows a text."""
    base, own = _object(rng, depth + 1), _object(rng, depth + 1)
    for branch in (base, own):
        del branch["additionalProperties"]
        branch["required"].append("kind")
    own["properties"] = {f"own {name}": each for name, each in own["properties"].items()}
    own["required"] = ["kind", *(f"own {name}" for name in own["required"][:-1])]
    base["properties"]["kind"], own["properties"]["kind"] = {"type": "string"}, {"const": "own"}
    return {"allOf": [base], **own} if rng.random() < 0.5 else {"allOf": [base, own]}
