"""`oneOf` and `allOf` of checked JSON schemas in another form: as `anyOf`, and as one object. Pure.

`oneOf` is `anyOf` where no text can match two branches: all are objects that require one property, a tag,
whose texts differ from branch to branch. `allOf` of objects is one object with the properties of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_MERGED = 1024
"""Branches and properties that all `allOf` of a schema may name, each reference followed."""
_SCHEMAS = ("items", "additionalProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS_OF_SCHEMAS = ("properties", "$defs", "definitions")
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties"}
Tags = Mapping[str, frozenset[str]]


class NotExactError(Exception):
    """Why an `allOf` is not one object."""


def mapped(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same with each schema right in it changed."""
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword in _SCHEMAS:
            changed[keyword] = change(value)
        elif keyword in _LISTS_OF_SCHEMAS:
            changed[keyword] = [change(each) for each in value]
        elif keyword in _MAPS_OF_SCHEMAS:
            changed[keyword] = {name: change(each) for name, each in value.items()}
    return changed


class Unions:
    """Those of one document, whose references are from its root; annotations constrain nothing."""

    def __init__(self, root: Any, annotations: set[str]) -> None:
        self._root, self._annotations = root, annotations
        self._known_tags: dict[int, tuple[Any, Tags]] = {}  # by the id of the schema, which is kept
        self._texts_by_ref: dict[str, frozenset[str]] = {}
        self._num_merged = 0

    def rewritten(self, schema: Any) -> Any:
        """The same without `oneOf` and `allOf`; NotExactError if an `allOf` has no such form."""
        if not isinstance(schema, dict):
            return schema
        if "allOf" in schema:
            return self.rewritten(self.merged(schema))
        if "oneOf" in schema:
            schema = {
                "anyOf" if key == "oneOf" else key: value
                for key, value in schema.items()
                if key != "discriminator"
            }
        return mapped(schema, self.rewritten)

    # --- oneOf

    def are_disjoint(self, branches: Sequence[Any]) -> bool:
        """Whether a tag tells them apart."""
        tags = [self._tags(each) for each in branches]
        return len(tags) < 2 or any(
            sum(len(each[name]) for each in tags) == len(texts) for name, texts in _common(tags).items()
        )

    def _tags(self, schema: Any) -> Tags:
        """Properties without which nothing matches, with the texts that each may be."""
        if not isinstance(schema, dict):
            return {}
        if id(schema) not in self._known_tags:
            self._known_tags[id(schema)] = schema, self._found_tags(schema)
        return self._known_tags[id(schema)][1]

    def _found_tags(self, schema: Mapping[str, Any]) -> Tags:
        if "$ref" in schema:
            return self._tags(self._at(schema["$ref"]))
        if "allOf" in schema:
            return self._tags(self.merged(schema))
        for union in ("oneOf", "anyOf"):
            if union in schema:
                return _common([self._tags(each) for each in schema[union]])
        if schema.get("type") != "object":
            return {}
        required, properties = schema.get("required", []), schema.get("properties", {})
        return {name: texts for name in dict.fromkeys(required) if (texts := self._texts(properties[name]))}

    def _texts(self, schema: Any) -> frozenset[str]:
        """All that a value may be, if these are texts; else nothing."""
        if isinstance(schema, dict) and "$ref" in schema:
            ref = schema["$ref"]
            if ref not in self._texts_by_ref:
                self._texts_by_ref[ref] = self._texts(self._at(ref))
            return self._texts_by_ref[ref]
        values = _values(schema)
        return frozenset(values) if all(isinstance(value, str) for value in values) else frozenset()

    # --- allOf

    def merged(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """One that matches what all branches of its `allOf`, and what is beside it, do. Raises NotExactError
        if there is none, or it is not known."""
        about = {key: value for key, value in schema.items() if key in self._annotations}
        own = {key: value for key, value in schema.items() if key not in {*about, "allOf"}}
        branches = [*schema["allOf"], *([{"type": "object"} | own] if own else [])]
        if not branches:
            raise NotExactError("is empty")
        if len(branches) == 1 and isinstance(branches[0], dict):
            return branches[0] | about
        objects = [self._object(each) for each in branches]
        properties: dict[str, Any] = {}
        for each in objects:
            for name, given in each.get("properties", {}).items():
                properties[name] = self._narrower(name, properties.get(name, True), given)
        for each in objects:
            forbidden = properties.keys() - each.get("properties", {}).keys()
            if each.get("additionalProperties") is False and forbidden:
                raise NotExactError(f"forbids {min(forbidden)!r} of another branch by additionalProperties")
        required = dict.fromkeys(name for each in objects for name in each.get("required", []))
        merged = {"type": "object", "properties": properties, "required": [*required]}
        return about | merged | {"additionalProperties": False}

    def _object(self, schema: Any) -> Mapping[str, Any]:
        """A branch as an object of named properties."""
        while isinstance(schema, dict) and ("$ref" in schema or "allOf" in schema):
            self._count(1)
            schema = self._at(schema["$ref"]) if "$ref" in schema else self.merged(schema)
        is_object = isinstance(schema, dict) and schema.get("type") == "object"
        if not is_object or schema.keys() - self._annotations - _OF_OBJECTS:
            raise NotExactError("has a branch that is not of type object")
        if schema.get("additionalProperties", False) is not False:
            raise NotExactError("has a branch with additionalProperties")
        self._count(1 + len(schema.get("properties", {})))
        return schema  # type: ignore[no-any-return]

    def _count(self, num: int) -> None:
        self._num_merged += num
        if self._num_merged > _MAX_MERGED:
            raise NotExactError(f"names over {_MAX_MERGED} branches and properties")

    def _narrower(self, name: str, one: Any, other: Any) -> Any:
        """Of two schemas of a property the one that says all."""
        bare = [self._bare(one), self._bare(other)]
        if not bare[0] or json.dumps(bare[0], sort_keys=True) == json.dumps(bare[1], sort_keys=True):
            return other
        if not bare[1] or _is_text_of(bare[0], bare[1]):
            return one
        if _is_text_of(bare[1], bare[0]):
            return other
        raise NotExactError(f"has different schemas of {name!r}")

    def _bare(self, schema: Any) -> Any:
        """Without what constrains nothing; empty if that is all."""
        if schema is True:
            return {}
        return {key: value for key, value in schema.items() if key not in self._annotations}

    def _at(self, ref: str) -> Any:
        found = self._root
        for part in ref.split("/")[1:]:
            found = found[part]
        return found


def _common(tags: Sequence[Tags]) -> dict[str, frozenset[str]]:
    """Tags that all have, with the texts of all."""
    names = set(tags[0]).intersection(*tags[1:]) if tags else set()
    return {name: frozenset[str]().union(*(each[name] for each in tags)) for name in sorted(names)}


def _values(schema: Any) -> list[Any]:
    """Those of a `const` or an `enum`."""
    if not isinstance(schema, dict):
        return []
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _is_text_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the first names texts, and the second is all texts."""
    values = _values(one)
    return bool(values) and all(isinstance(each, str) for each in values) and other == {"type": "string"}
